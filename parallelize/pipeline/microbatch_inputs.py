"""The inputs of a step, split into microbatches, on every stage."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from parallelize import _torch_private as private
from parallelize.comm.groups import Group
from parallelize.errors import Problem, ShapeError
from parallelize.pipeline.payload import Meta, Nested, unpickled

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
        form = tuple(Meta.of(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        return (form, repr(structure), mode)


def split_batch(
    args: tuple, kwargs: dict[str, Any], targets: Any, count: int, unsplit: Collection[str]
) -> list[MicrobatchInputs]:
    """Split a batch along dim 0 into `count` equal microbatches.

    The size of the batch is dim 0 of the first tensor. Passed to every microbatch unchanged are: tensors with another
    dim 0 (position ids [1, S], a mask [S, S]), inputs that `unsplit` names, and values that are not tensors.

    Raises: ShapeError `no-inputs`, `indivisible-batch`.
    """
    tensors = [leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not tensors:
        raise ShapeError(
            Problem("no-inputs", "no tensor was passed to the step", fix="step(input_ids=..., targets=...)")
        )
    batch = tensors[0].shape[0]
    if batch % count or not batch:
        divisors = [str(n) for n in range(1, batch + 1) if batch % n == 0]
        what = f"a batch of {batch} sequences cannot be split into {count} microbatches"
        fix = f"with this batch: {', '.join(divisors) or 'none'} microbatches; or a batch of a multiple of {count} sequences"
        raise ShapeError(Problem("indivisible-batch", what, fix=fix))
    size = batch // count

    def part(value: Any, index: int) -> Any:
        def narrowed(leaf: Any) -> Any:
            is_batched = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == batch
            return leaf.narrow(0, index * size, size) if is_batched else leaf

        return private.tree_map(narrowed, value)

    return [
        MicrobatchInputs(
            tuple(part(arg, index) for arg in args),
            {key: value if key in unsplit else part(value, index) for key, value in kwargs.items()},
            targets if "targets" in unsplit else part(targets, index),
            index * size,
            size,
            batch,
        )
        for index in range(count)
    ]


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
