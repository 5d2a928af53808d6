"""The inputs of a step, split into microbatches, on every stage."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch

from parallelize.axes.batch.input_batch import InputBatch
from parallelize.axes.batch.row_inputs import TARGETS, is_array
from parallelize.axes.pipeline.payload import Meta, Nested, unpickled
from parallelize.base.errors import Problem, ShapeError
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group

T = torch.Tensor


@dataclass(frozen=True)
class MicrobatchInputs:
    """The call of the model for one microbatch.

    Attributes:
        args, kwargs: the arguments of the model.
        targets: the targets of the loss.
        batch_offset: index of its first sequence in this rank's batch.
        size: number of its sequences.
        batch_size: number of sequences in this rank's batch.
    """

    args: tuple
    kwargs: dict[str, Any]
    targets: Any
    batch_offset: int = 0
    size: int = 0
    batch_size: int = 0

    def signature(self, mode: object) -> tuple:
        """Equal for microbatches from which stages compute tensors of the same shapes."""
        leaves, structure = private.tree_flatten((self.args, self.kwargs))
        return (tuple(map(_form, leaves)), repr(structure), mode)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, T):
        return Meta.of(leaf)
    return (leaf.shape, str(leaf.dtype)) if is_array(leaf) else repr(leaf)


def split_batch(batch: InputBatch, count: int) -> list[MicrobatchInputs]:
    """Split a batch along its sequences into `count` equal microbatches.

    Split are tensors and arrays [batch, ..], and lists that `whole` says to have an entry for each sequence. Passed to every microbatch
    unchanged is all else: tensors with another dim 0 (position ids [1, S], a mask [S, S]), inputs that `whole` names, other values.

    Raises: ShapeError `no-inputs`, `indivisible-batch`, `unclear-batch-dim`.
    """
    total = batch.size
    if total % count or not total:
        divisors = [str(n) for n in range(1, total + 1) if total % n == 0]
        what = f"a batch of {total} sequences cannot be split into {count} microbatches"
        fix = f"with this batch: {', '.join(divisors) or 'none'} microbatches; or a batch of a multiple of {count} sequences"
        raise ShapeError(Problem("indivisible-batch", what, fix=fix))
    if count == 1:
        return [MicrobatchInputs(batch.args, batch.kwargs, batch.targets, 0, total, total)]
    batch.rows.refuse_unclear()
    size = total // count
    return [_part(batch, start, size) for start in range(0, total, size)]


def _part(batch: InputBatch, start: int, size: int) -> MicrobatchInputs:
    inputs = batch.rows.part(start, start + size)
    targets = inputs.pop(TARGETS)
    return MicrobatchInputs(*batch.call(inputs), targets, start, size, batch.size)


def broadcast_nested(value: Any, group: Group, device: torch.device, source: int = 0) -> Any:
    """The nested value of the group's rank `source`, on every rank. Two broadcasts, and one for each tensor."""
    if group.size == 1:
        return value
    form: Nested | None = None
    tensors: list[T] = []
    raw = torch.empty(0, dtype=torch.uint8)
    if group.rank == source:
        form, tensors = Nested.of(value)
        raw = torch.frombuffer(bytearray(pickle.dumps(form)), dtype=torch.uint8)
    size = torch.tensor([raw.numel()], device=device)
    group.broadcast(size, source)
    raw = raw.to(device) if group.rank == source else torch.empty(int(size), dtype=torch.uint8, device=device)
    group.broadcast(raw, source)
    if form is None:
        form = unpickled(raw)
        tensors = [meta.empty(device) for meta in form.metas]
    for index, tensor in enumerate(tensors):
        tensors[index] = tensor = tensor.to(device).contiguous()
        group.broadcast(tensor, source)
    received = iter(tensors)
    return form.fill(lambda _: next(received))
