"""`ParallelSFTTrainer`: TRL's SFTTrainer around a model of `parallelize_model`.

TRL replaces the model's forward with one that multiplies hidden states by the head's weight, of which a rank stores a
shard. Here the model's own forward computes the same loss; `loss_parallel=True` or `fuse_loss=True` stores no full
logits.
"""

from __future__ import annotations

from typing import Any

from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.base.errors import ModelError, Problem
from parallelize.training.trainers.trainer import ParallelTrainer

_LOSSES = ("nll", "chunked_nll")


class ParallelSFTTrainer(ParallelTrainer):
    """As `ParallelTrainer`, before TRL's `SFTTrainer` among the base classes. TRL's own metrics (entropy, token
    accuracy) are not logged.

    Args:
        model, args, more, global_batch_size, keywords: as for `ParallelTrainer`.

    Raises: as `ParallelTrainer`; `trainer-option` also for other losses than `nll`, and for `activation_offloading`.
    """

    served_of_trl = ("trl.trainer.sft_trainer", "trl.trainer.base_trainer")

    def __init__(self, model: ParallelModel, args: Any = None, *more: Any, **keywords: Any):
        _refuse(args)
        attributes = vars(model.module) if isinstance(model, ParallelModel) else {}
        forward = attributes.get("forward")
        super().__init__(model, args, *more, **keywords)
        del attributes["forward"]  # TRL's
        if forward is not None:
            attributes["forward"] = forward

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the model's own forward, and, as TRL divides it, the load-balancing loss of a mixture.

        Args:
            model, inputs: the model is called with the inputs of a batch. return_outputs: return (loss, outputs).
            num_items_in_batch: divides the loss.
        """
        stock: Any = next(cls for cls in type(self).__mro__ if cls.__module__ == "transformers.trainer")
        trl: Any = self
        inputs = {**inputs, "use_cache": False}
        # TRL's evaluation names none: over cp the model would count the labels of all data ranks
        if num_items_in_batch is None:
            num_items_in_batch = trl._get_num_items_in_batch([inputs], self.args.device)
        loss, outputs = stock.compute_loss(self, model, inputs, True, num_items_in_batch)
        steps = trl.current_gradient_accumulation_steps if model.training else 1
        if trl.aux_loss_enabled and steps > 1:  # the model has added all of it
            loss = loss - trl.router_aux_loss_coef * outputs.aux_loss * (1 - 1 / steps)
        return (loss, outputs) if return_outputs else loss

    def _set_signature_columns_if_needed(self) -> None:
        """The columns that TRL makes, which do not depend on the model."""
        super(ParallelTrainer, self)._set_signature_columns_if_needed()  # type: ignore[misc]


def _refuse(args: Any) -> None:
    loss, fix = getattr(args, "loss_type", "nll"), "loss_type='nll', or compute_loss_func"
    problems = []
    if loss not in _LOSSES:
        problems.append(Problem("trainer-option", f"loss_type={loss!r} is not served by ParallelSFTTrainer", fix=fix))
    if getattr(args, "activation_offloading", False):
        what = "activation_offloading is not served by ParallelSFTTrainer"
        problems.append(Problem("trainer-option", what, fix='parallelize_model(..., recompute="full")'))
    if problems:
        raise ModelError(*problems)
