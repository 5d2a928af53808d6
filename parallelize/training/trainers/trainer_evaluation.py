"""Evaluation of a `ParallelTrainer`: losses and predictions of the data ranks, in the order of the data set, on every
rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from parallelize.axes.context.forward_state import context_of
from parallelize.axes.context.local_sequences import gather_sequence
from parallelize.axes.pipeline.batch_reader import broadcast_nested
from parallelize.axes.vocabulary.logits.sharded_logits import ShardedLogits
from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import SAMPLE_AXES
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.models.label_loss import label_loss

T = torch.Tensor
IGNORED = -100


class TrainerEvaluation:
    """The methods of the stock Trainer that evaluate and predict."""

    parallel: Any
    args: Any
    has_stages: bool
    gather_function: Any
    accelerator: Any
    _evaluated: Any = None  # the loader of the running evaluation
    _repeats_losses = False  # whether the running evaluation weighs a last batch of fewer samples like the others

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """The stock loop; what it gathers is that of the data ranks."""
        # the stock Seq2SeqTrainer gathers without dropping what a last batch repeats: of the loss, its copies
        self._repeats_losses = self.gather_function == self.accelerator.gather
        self._evaluated, self.gather_function = dataloader, self._gather
        return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Loss, predictions and labels of one batch. Pipeline stages run it together, and the last one sends the others
        what it has."""
        if self.has_stages:
            return self._predict_on_stages(inputs, prediction_loss_only, ignore_keys or [])
        stock: Any = super()
        loss, logits, labels = stock.prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        loss = over_sequences(loss, self.parallel.pipeline.mesh) if loss is not None else None
        return loss, private.tree_map(self._full, logits), labels

    def _full(self, value: Any) -> Any:
        """Predictions of full sequences, with all of the vocabulary. A collective over `tp` and `cp` where they are
        sharded."""
        return _gather_tokens(self.parallel, value.full_tensor() if isinstance(value, ShardedLogits) else value)

    def _gather(self, tensors: Any) -> Any:
        """Of each tensor, the rows of all data ranks, in the order of the data set."""
        count = getattr(self._evaluated, "samples", None)
        if self._repeats_losses and count:
            count = None
        group = data_group(self.parallel.pipeline.mesh)
        return private.tree_map(lambda tensor: _rows_of_ranks(tensor, count, group), tensors)

    def _predict_on_stages(
        self, inputs: dict[str, Any], loss_only: bool, ignore_keys: list[str]
    ) -> tuple[Any, Any, Any]:
        stock: Any = self
        pipeline = self.parallel.pipeline
        inputs = stock._prepare_inputs(inputs)
        labels = inputs.get("labels")
        batch, size = _divisible(inputs, pipeline.schedule.num_microbatches)
        count = stock._get_num_items_in_batch([inputs], self.args.device)
        parts = pipeline.schedule.num_microbatches
        weights = [1.0] * parts if count is not None else self._weights(batch, labels, parts)
        with stock.compute_loss_context_manager():
            outputs = self.parallel.forward(**batch, **({} if count is None else {"num_items_in_batch": count}))
        ignored = {*ignore_keys, "loss", *getattr(stock.model.config, "keys_to_ignore_at_inference", ())}
        value = _joined(self._full, outputs, weights, size, None if loss_only else ignored)
        last = pipeline.schedule.stage_ranks[-1]
        loss, logits = broadcast_nested(value, pipeline.group, pipeline.device, last)
        loss = over_sequences(loss, self.parallel.pipeline.mesh) if loss is not None else None
        return loss, logits, None if loss_only else labels

    def _weights(self, batch: dict[str, Any], labels: Any, parts: int) -> list[float]:
        """The weight of each microbatch in the loss of the batch, whose losses are means. Raises: ModelError
        `trainer-option`."""
        if labels is None or parts <= 1:
            return [1.0] * parts
        kind = label_loss(self.parallel.module, labels)
        rows, padded = len(labels), len(batch["labels"]) != len(labels)
        if kind.mean_over == "labels":
            targets = kind.targets(batch["labels"], batch.get("attention_mask"))[..., kind.shift :]
            counts = [int((part != IGNORED).sum()) for part in targets.chunk(parts)]
        elif kind.mean_over == "samples" and not padded:
            counts = [rows // parts] * parts
        else:
            name = type(self.parallel.module).__name__
            what = (
                f"the loss of {name} for {rows} samples is not known from those of {parts} microbatches: {kind.unknown}"
            )
            fix = (
                "per_device_eval_batch_size and a number of samples that num_microbatches divides; or a mesh without pp"
            )
            raise ModelError(Problem("trainer-option", what, fix=fix))
        return [count / max(1, sum(counts)) for count in counts]


def _joined(
    full: Callable[[Any], Any], outputs: list[Any], weights: list[float], size: int, ignored: set[str] | None
) -> tuple[Any, Any]:
    """(loss, predictions) of the microbatches of one batch; of a stage that is not the last, nothing. `ignored`: None
    for the loss alone."""
    if not outputs:
        return None, None
    losses = [
        (output["loss"], weight)
        for output, weight in zip(outputs, weights, strict=True)
        if output.get("loss") is not None and weight
    ]
    loss = torch.stack([value * weight for value, weight in losses]).sum() if losses else None
    if ignored is None:
        return loss, None
    names = [name for name in outputs[0] if name not in ignored]
    logits = tuple(torch.cat([full(output[name]) for output in outputs])[:size] for name in names)
    return loss, logits[0] if len(logits) == 1 else logits


def _divisible(inputs: dict[str, Any], count: int) -> tuple[dict[str, Any], int]:
    """The batch with its last row repeated, without labels, until microbatches divide it; and its number of rows."""
    size = next(value.shape[0] for value in inputs.values() if isinstance(value, T) and value.ndim)
    more = -size % count

    def longer(name: str, value: Any) -> Any:
        if not isinstance(value, T) or not value.ndim or value.shape[0] != size:
            return value
        rows = value[-1:].expand(more, *value.shape[1:])
        return torch.cat([value, torch.full_like(rows, IGNORED) if "labels" in name else rows])

    return {name: longer(name, value) for name, value in inputs.items()} if more else inputs, size


def _gather_tokens(parallel: Any, value: Any) -> Any:
    """The tokens of all ranks of `cp`. A collective. Raises: ModelError `trainer-option` for what has no dim of
    tokens."""
    context = context_of(parallel.module)
    if context is None or not isinstance(value, T) or value.ndim == 0:
        return value
    tokens = sum(stop - start for start, stop in context.local_runs())
    if value.ndim < 2 or value.shape[1] != tokens:
        what = f"a prediction {list(value.shape)} does not have the {tokens} tokens of this rank of cp in dim 1"
        fix = "prediction_loss_only=True, ignore_keys with its name, or a mesh without cp"
        raise ModelError(Problem("trainer-option", what, fix=fix))
    return gather_sequence(parallel, value)


def over_sequences(loss: T, mesh: MeshView) -> T:
    """The sum over `cp` of the parts of a loss: each of its ranks has computed that of its tokens."""
    if mesh.spec.ranks("cp") == 1:
        return loss
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.group("cp").pg)
    return total


def data_group(mesh: MeshView) -> Any:
    """The ranks that get other samples; None where there is one data rank."""
    return mesh.group(*SAMPLE_AXES).pg if mesh.sample_place[1] > 1 else None


def _rows_of_ranks(tensor: T, count: int | None, group: Any) -> T:
    """The first `count` rows (of a repeated batch: none) of each rank, one after another.

    Args:
        tensor: [rows, ...]; all dims but the first are equal on all ranks. A scalar is a row.
        count: samples of this rank's batch; None: all rows.
        group: of the data ranks.
    """
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    rows = tensor[:count].contiguous()
    if group is None:
        return rows
    sizes = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([rows.shape[0]], device=rows.device), group=group)
    longest = max(int(size) for size in sizes)
    padded = pad(rows, (0, 0) * (rows.ndim - 1) + (0, longest - rows.shape[0]))
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])
