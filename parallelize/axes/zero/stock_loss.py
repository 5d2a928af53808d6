"""The loss that a stock model computes from `labels`, over data ranks: a part of the mean over all of them.

Gradients are sums over the data axes, so that a mean over the labels of one rank would count as many times as there are
ranks. Over `cp` the inputs of context parallelism do the same.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from parallelize.axes.vocabulary.loss.losses import valid_tokens
from parallelize.base.errors import ModelError, Problem
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.models.label_loss import LabelLoss, label_loss
from parallelize.plan.models.wrapped_models import stock_model
from parallelize.state.records import applied

T = torch.Tensor
_OTHERS = ("start_positions", "end_positions", "return_loss")
"""Arguments of `transformers` that ask for a loss, besides those with `label` in their names."""


def count_over_data_ranks(module: nn.Module, mesh: MeshView) -> None:
    """Let the loss of a model of `transformers`, in calls that build a graph, be divided by the count of all data
    ranks."""
    module = stock_model(module)
    parameters = inspect.signature(type(module).forward).parameters
    if hasattr(module, "loss_function") and any(_asks_for_loss(name) for name in parameters):
        counts = _Counts(type(module), mesh)
        module.register_forward_pre_hook(counts, with_kwargs=True)
        module.register_forward_hook(counts.weigh)


def _asks_for_loss(name: str) -> bool:
    return "label" in name or name in _OTHERS


class _Counts:
    """Before a forward: passes `num_items_in_batch`, by which some losses divide their sum. After it: makes a mean over
    this rank's labels this rank's part of the mean over all.

    Raises: ModelError `labels-over-data-ranks` for losses that are no such mean.
    """

    def __init__(self, model: type[nn.Module], mesh: MeshView):
        self.mesh, self.signature = mesh, inspect.signature(model.forward)
        self.weight: tuple[T, T] | None = None  # the labels of this rank and of all, in a forward whose loss is a mean

    def __deepcopy__(self, memo: dict) -> _Counts:
        return self

    def __call__(self, module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        self.weight = None
        if applied(module).context is not None or not torch.is_grad_enabled():
            return None
        call = self.signature.bind_partial(None, *args, **kwargs).arguments
        labels: Any = call.get("labels")
        other_inputs = [
            name for name, value in call.items() if _asks_for_loss(name) and value is not None and value is not False
        ]
        if not other_inputs:
            return None
        kind = (
            label_loss(module, labels)
            if other_inputs == ["labels"]
            else LabelLoss(unknown=f"it reads {', '.join(other_inputs)}")
        )
        passed = kwargs.get("num_items_in_batch")
        if kind.divides and passed is not None:
            return None
        total, local = self._totals(
            kind, labels, kwargs.get("shift_labels"), call.get("attention_mask"), passed, module
        )
        if kind.divides:
            return args, {**kwargs, "num_items_in_batch": total}
        self.weight = None if kind.mean_over == "none" else (local, total)
        return None

    def _totals(
        self, kind: LabelLoss, labels: Any, shifted: T | None, mask: T | None, passed: Any, module: nn.Module
    ) -> tuple[T, T]:
        """What the mean over all data ranks is over, and what that of this rank is over."""
        if not kind.mean_over or (kind.adds_router_loss and not kind.divides):
            raise _refused(type(module).__name__, kind.unknown or "it adds a load-balancing loss")
        counted = shifted
        if counted is None:
            counted = (
                kind.targets(labels, mask)[..., kind.shift :]
                if kind.mean_over == "labels"
                else labels.new_zeros(len(labels))
            )
        total = valid_tokens(counted, self.mesh) if passed is None else torch.as_tensor(passed)
        return total, valid_tokens(counted)

    def weigh(self, module: nn.Module, args: Any, output: Any) -> Any:
        """This rank's part of the mean, in the output of the forward."""
        weight, self.weight = self.weight, None
        if weight is None:
            return None
        local, total = (count.to(device=_loss_of(output).device) for count in weight)
        loss = _loss_of(output)
        part = torch.where(local > 0, loss * (local / total), torch.zeros_like(loss))  # of no labels the mean is nan
        if isinstance(output, tuple):
            return (part, *output[1:])
        output.loss = part
        return output


def _loss_of(output: Any) -> T:
    return output[0] if isinstance(output, tuple) else output.loss


def _refused(name: str, reason: str) -> ModelError:
    what = (
        f"the loss of {name} over one data rank, of which the gradients would be summed over all, is no part of a "
        f"mean: {reason}"
    )
    fix = (
        "compute the loss from the logits, divided by the count over all data ranks: ParallelModel.step(..., "
        "targets=...)"
    )
    return ModelError(Problem("labels-over-data-ranks", what, fix=fix))
