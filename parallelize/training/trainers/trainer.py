"""`ParallelTrainer`: the stock `transformers.Trainer` around a model of `parallelize_model`.

    class MyTrainer(ParallelTrainer, Trainer):
        pass

    parallel = parallelize_model(model, mesh, zero=2)
    trainer = MyTrainer(parallel, TrainingArguments(...), train_dataset=..., global_batch_size=64)

The stock loop, its callbacks and its logs run unedited. Only batches, the
division of the loss, what the optimizer steps, clipping and files differ.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from parallelize.axes.context.forward_state import context_of
from parallelize.axes.pipeline.batch_reader import token_loss
from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.base.errors import ModelError, Problem, ShapeError
from parallelize.comm.handshake import agree_on
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.models.label_loss import label_loss
from parallelize.plan.models.wrapped_models import forward_signature, stock_model
from parallelize.state.loop.accumulate import accumulate_gradients
from parallelize.state.loop.clip import clip_grad_norm_
from parallelize.state.randomness.dropout.position import Position
from parallelize.state.records import applied, record_of
from parallelize.training.data.loader_check import check_loader
from parallelize.training.trainers import served_options as served
from parallelize.training.trainers.own_losses import checked_parts
from parallelize.training.trainers.trainer_checkpoints import TrainerCheckpoints
from parallelize.training.trainers.trainer_evaluation import TrainerEvaluation, data_group, over_sequences
from parallelize.training.trainers.trainer_loaders import TrainerLoaders

T = torch.Tensor

OVERRIDDEN = (
    *("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "get_total_train_batch_size"),
    *("evaluation_loop", "prediction_step", "train", "save_model", "_load_from_checkpoint", "_load_best_model"),
    *("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler", "_save_rng_state", "_load_rng_state"),
    *("_save_scaler", "_load_scaler", "create_optimizer", "_prepare_for_training", "get_batch_samples"),
    *("training_step", "_clip_grad_norm", "_get_grad_norm", "autocast_smart_context_manager"),
    *("floating_point_ops", "_track_num_input_tokens", "_set_signature_columns_if_needed"),
    "_move_model_to_device",
)
"""Methods of the stock Trainer (5.23) that must exist, as they are overridden here."""


class ParallelTrainer(TrainerLoaders, TrainerEvaluation, TrainerCheckpoints):
    """A mixin that lets a stock Trainer train a model on a mesh. It stands before the Trainer among the base classes.

    Args:
        model: what `parallelize_model` returned.
        args: `TrainingArguments`. On a mesh with `pp`, `gradient_accumulation_steps` batches become one, which the
            pipeline splits into its microbatches.
        global_batch_size: samples of an optimizer step, over all data ranks, from which `per_device_train_batch_size`
            is computed, so that a run on another mesh has the same steps. Default: what `args` say.
        more, keywords: the other arguments of the stock Trainer.

    A `compute_loss` or `compute_loss_func` of your own returns this rank's part of the mean: a sum, divided by
    `num_items_in_batch`, which counts the labels of all data ranks and accumulated batches; or a multiple of the loss
    that the model itself computes. A `compute_loss` of another kind is refused in the first step on several data ranks,
    and always on a mesh with `pp`.

    Raises: ModelError `trainer-model`, `trainer-option`, `trainer-version`; MeshError `trainer-mesh`; ShapeError
        `indivisible-batch`; in training HandshakeError where ranks have other arguments.
    Cost: of a step that of the model, and an all-reduce of two scalars over the data ranks.
    """

    served_of_trl: tuple[str, ...] = ()
    has_stages: bool
    optimizer: Any

    def __init__(
        self, model: ParallelModel, args: Any = None, *more: Any, global_batch_size: int | None = None, **keywords: Any
    ):
        served.refuse_other_models(model)
        served.refuse_other_trainers(self, self.served_of_trl)
        served.refuse_other_versions(self, ParallelTrainer, OVERRIDDEN)
        self.parallel = model
        self.has_stages = model.pipeline.mesh.spec.ranks("pp") > 1
        args = args if args is not None else _default_arguments()
        served.refuse_other_meshes(model, args)
        served.refuse_options(self, args, keywords)
        self._set_batch_size(args, global_batch_size)
        args.average_tokens_across_devices = False  # here counts are over all data ranks already
        super().__init__(model.module, args, *more, **keywords)  # type: ignore[call-arg]
        self.model_accepts_loss_kwargs = self._accepts_loss_keywords()
        self._window = BackwardWindow(model.module)
        self._rows: list[int] = []  # of each batch of the running step
        self._forwards = 0  # of the running step
        self._is_first = True  # the next training step
        self._own_model()

    @property
    def mesh(self) -> Any:
        """The mesh of the model."""
        return self.parallel.mesh

    @property
    def mesh_view(self) -> MeshView:
        """The mesh as this rank sees it."""
        return self.parallel.pipeline.mesh

    def _accepts_loss_keywords(self) -> bool:
        """Whether the model's loss is a sum over labels, divided by the count it is passed. Others take the count and
        ignore it."""
        model = self.parallel.module
        known = getattr(stock_model(model), "accepts_loss_kwargs", None)
        return known is not False and label_loss(model, torch.zeros(1, 1, dtype=torch.int64)).divides

    def _forward_parameters(self) -> Any:
        return forward_signature(self.parallel.module).parameters

    def _set_signature_columns_if_needed(self) -> None:
        """The columns of the data that the model reads."""
        stock: Any = self
        if stock._signature_columns is None and self.has_stages:
            names = [name for name in self._forward_parameters() if name != "self"]
            stock._signature_columns = list({*names, "label", "label_ids", *stock.label_names})
        else:
            cast(Any, super())._set_signature_columns_if_needed()

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Nothing: the model is where `parallelize_model` has put it, and some ranks refer to its parameters."""

    # -- what the stock loop prepares -----------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer that `args` name, for shards. The groups are those of the stock Trainer, the same on every
        mesh.

        Args:
            model: not used: the parameters are those of the model on the mesh.

        Raises: ModelError `trainer-option`, and as `build_optimizer`.
        """
        stock: Any = self
        if self.optimizer is None:
            cls, options = stock.optimizer_cls_and_kwargs or stock.get_optimizer_cls_and_kwargs(self.args, stock.model)
            decayed = set(stock.get_decay_parameter_names(stock.model))
            trained = [(name, p) for name, p in stock.model.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for name, p in trained if name in decayed], "weight_decay": self.args.weight_decay},
                {"params": [p for name, p in trained if name not in decayed], "weight_decay": 0.0},
            ]
            self.optimizer = self.parallel.optimizer(_optimizer_class(cls, options), groups, **options)
        return self.optimizer

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """The optimizer, its scheduler and the state of a checkpoint. accelerate wraps no model here, and divides no
        data."""
        stock: Any = self
        with agree_on(self.mesh_view) as facts:
            facts |= self._facts(max_steps)
            served.refuse_own_losses(self)
            check_loader(train_dataloader, self.mesh_view)
        if stock._created_lr_scheduler:
            stock.lr_scheduler, stock._created_lr_scheduler = None, False
        self.create_optimizer()
        self.stepped_optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        stock.create_scheduler(num_training_steps=max_steps, optimizer=self.stepped_optimizer)
        self.optimizer = self.accelerator.prepare_optimizer(self.stepped_optimizer, device_placement=False)
        model = self._own_model()
        self._load_optimizer_and_scheduler(resume_from_checkpoint)
        handler = stock.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = stock.model, self.optimizer, stock.lr_scheduler
        handler.train_dataloader = train_dataloader
        return model, train_dataloader

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Autocast around each forward, where `args` ask for it; `cache_enabled` is that of `torch.autocast`."""
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.args.device.type, dtype, cache_enabled=bool(cache_enabled))

    # -- a step ---------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list, Any]:
        """The batches of a step, and the number of their labels over all data ranks, which divides the loss.

        Args:
            epoch_iterator: gives the batches of this data rank. num_batches: as many are taken. device: of the count.
        """
        stock: Any = super()
        batches, count = stock.get_batch_samples(epoch_iterator, num_batches, device)
        self._rows, self._forwards = [_num_rows(batch) for batch in batches], 0
        return batches, count if count is None else self._sum_over_data_ranks(torch.as_tensor(count, device=device))

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> T:
        """Forward and backward of one batch.

        Args:
            model: as the stock loop calls it. inputs: the batch of this data rank, by names.
            num_items_in_batch: divides the loss.

        Returns: the batch's part of the loss over all data ranks, the same on every rank.
        Raises: ModelError `trainer-option`, `labels-over-data-ranks`; on a mesh with `pp` as `Pipeline.step`.
        """
        if self.has_stages:
            return self._step_of_stages(model, inputs)
        stock: Any = super()
        served.refuse_uncounted(self, num_items_in_batch)
        first, self._is_first = self._is_first, False
        with (
            self._window.backward(last=self.accelerator.sync_gradients),
            self._positioned(),
            checked_parts(self, num_items_in_batch) if first else nullcontext(),
        ):
            loss = stock.training_step(model, inputs, num_items_in_batch)
        return self._sum_over_data_ranks(over_sequences(loss, self.mesh_view))

    def _step_of_stages(self, model: Any, inputs: dict[str, Any]) -> T:
        """The stages of a pipeline run a step together; the last one computes the loss."""
        stock: Any = self
        model.train()
        inputs = dict(stock._prepare_inputs(inputs))
        labels, shifted = inputs.pop("labels", None), inputs.pop("shift_labels", None)
        aligned = shifted is not None or self.parallel.pipeline.batches.loss is not token_loss
        named = {"targets": labels if shifted is None else shifted} if aligned else {"labels": labels}
        self.parallel.pipeline.steps_done = stock.state.global_step
        count = self._local_count({"labels": labels, "shift_labels": shifted})
        with stock.compute_loss_context_manager(), self._counted(count):
            return self.parallel.step(**inputs, **named)

    def _local_count(self, labels: dict[str, Any]) -> int | None:
        """The labels of this rank, as the stock Trainer counts them; None where the model's loss is a mean that takes
        no count."""
        stock: Any = self
        count = stock._get_num_items_in_batch([{k: v for k, v in labels.items() if v is not None}], self.args.device)
        if count is None or self.parallel.pipeline.batches.loss is not token_loss:
            return None
        context = context_of(self.parallel.module)
        return int(count) if context is None or context.group.rank == 0 else 0  # of the same samples on each rank of cp

    @contextmanager
    def _counted(self, count: int | None) -> Iterator[None]:
        """The loss of a step inside is divided by the sum of these counts over all ranks."""
        batches = self.parallel.pipeline.batches
        own = batches.count
        if count is not None:
            batches.count = lambda targets: count
        try:
            yield
        finally:
            batches.count = own

    def _positioned(self) -> Any:
        """The position of the next forward in training. Dropout is a function of it, on every mesh."""
        clock, state = self.parallel.pipeline.clock, cast(Any, self).state
        number, self._forwards = self._forwards, self._forwards + 1
        if clock is None or number >= len(self._rows):
            return nullcontext()
        index, data_ranks = self.mesh_view.sample_place
        first = data_ranks * sum(self._rows[:number]) + index * self._rows[number]
        return clock.at(Position(state.global_step, first, self._rows[number]))

    def _sum_over_data_ranks(self, value: T) -> T:
        """The sum over the data ranks."""
        group = data_group(self.mesh_view)
        if group is None:
            return value
        total = value.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    def _clip_grad_norm(self, model: Any) -> T:
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self.parallel.module, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: T | None = None) -> T:
        return clip_grad_norm_(self.parallel.module, math.inf) if grad_norm is None else grad_norm

    # -- what the stock Trainer counts ----------------------------------------------------------------------------

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Of this rank's `inputs`: the ranks of tp and cp do the work of one together."""
        stock: Any = super()
        spec = self.mesh_view.spec
        return stock.floating_point_ops(inputs) / (spec.ranks("tp") * spec.ranks("cp"))

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """The stock count is a sum over all ranks, though the ranks of one data rank have the same tokens."""
        stock: Any = super()
        state = cast(Any, self).state
        before = state.num_input_tokens_seen
        stock._track_num_input_tokens(inputs)
        copies = self.mesh_view.size // self.mesh_view.sample_place[1]
        state.num_input_tokens_seen = before + (state.num_input_tokens_seen - before) // copies

    # -- parts ----------------------------------------------------------------------------------------------------

    def _set_batch_size(self, args: Any, global_batch_size: int | None) -> None:
        """Samples of one forward, from those of an optimizer step; pipelines accumulate over their microbatches."""
        data_ranks = self.mesh_view.sample_place[1]
        if global_batch_size is not None:
            parts = data_ranks * args.gradient_accumulation_steps
            if global_batch_size % parts:
                what = f"a global batch of {global_batch_size} samples cannot be split into {parts} forwards"
                fix = f"a multiple of {data_ranks} data ranks x {args.gradient_accumulation_steps} accumulation steps"
                raise ShapeError(Problem("indivisible-batch", what, fix=fix))
            args.per_device_train_batch_size = global_batch_size // parts
        self.accumulated = args.gradient_accumulation_steps
        if self.has_stages:
            args.per_device_train_batch_size *= args.gradient_accumulation_steps
            args.gradient_accumulation_steps = 1

    def _own_model(self) -> Any:
        """The model that the stock loop calls, which accelerate must not prepare."""
        args, model = self.args, self.parallel.module
        if args.torch_compile:
            model = torch.compile(model, backend=args.torch_compile_backend, mode=args.torch_compile_mode)
        stock: Any = self
        stock.model_wrapped = model
        if not self.accelerator._models:
            self.accelerator._models.append(model)
        return model

    def _facts(self, max_steps: int) -> dict[str, str]:
        """What all ranks must have alike."""
        data = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed")
        updates = ("learning_rate", "optim", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm")
        names = (*data, *updates, "bf16", "fp16")
        order = (
            {} if self.train_batches is None else {f"data: {k}": str(v) for k, v in self.train_batches.order().items()}
        )
        return {"max_steps": str(max_steps)} | {name: str(getattr(self.args, name)) for name in names} | order


def _num_rows(batch: Any) -> int:
    return next((value.shape[0] for value in batch.values() if isinstance(value, T) and value.ndim), 0)


def _default_arguments() -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(output_dir="tmp_trainer")


def _optimizer_class(cls: Any, options: dict[str, Any]) -> Any:
    """Raises: ModelError `trainer-option` for what is no optimizer of the parameters it is given."""
    if not isinstance(cls, type) or {"params", "model", "optimizer_dict"} & set(options):
        what = (
            f"{getattr(cls, '__name__', cls)} is not built from groups of parameters, as the optim of this trainer "
            "must be"
        )
        fix = "optim='adamw_torch', or optimizers=(parallel.optimizer(torch.optim.AdamW, ...), None)"
        raise ModelError(Problem("trainer-option", what, fix=fix))
    return cls


# -- backward window -------------------------------------------------------------------------------------------------
# The backward passes of one optimizer step, which a trainer runs one call at a time: ranks sum gradients after the
# last.


class BackwardWindow:
    """`accumulate_gradients` over several calls; each says whether it is the last one.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self._open: ExitStack | None = None

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around one backward pass. An error ends the window, and drops what was to be summed."""
        if self._open is None and not last and self._sums():
            self._open = ExitStack()
            self._open.enter_context(accumulate_gradients(self.module))
        try:
            yield
        except BaseException:
            window, self._open = self._open, None
            if window is not None:
                window.__exit__(*sys.exc_info())
            raise
        if last and self._open is not None:
            window, self._open = self._open, None
            window.close()

    def _sums(self) -> bool:
        """Whether ranks sum any gradients of this model."""
        return record_of(self.module) is not None or applied(self.module).data is not None
