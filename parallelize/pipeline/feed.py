"""The inputs of a step, cut into microbatches, on every stage."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from parallelize import _torch_private as private
from parallelize.errors import Problem, ShapeError
from parallelize.groups import Group
from parallelize.pipeline.package import Meta, Nested, unpickled

T = torch.Tensor


@dataclass(frozen=True)
class Feed:
    """What one microbatch is called with. `batch_offset`: the first of its rows in this rank's batch of `batch` rows."""

    args: tuple
    kwargs: dict[str, Any]
    targets: Any
    batch_offset: int = 0
    rows: int = 0
    batch: int = 0

    def signature(self, mode: object) -> tuple:
        """Equal for microbatches from which stages make tensors of the same shapes."""
        leaves, structure = private.tree_flatten((self.args, self.kwargs))
        form = tuple(Meta.of(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        return (form, repr(structure), mode)


def microbatches(args: tuple, kwargs: dict[str, Any], targets: Any, count: int, whole: Collection[str]) -> list[Feed]:
    """Cut a batch along dim 0 into `count` equal parts.

    The batch is the first tensor's dim 0. Tensors of another dim 0 (position ids [1, S], a mask [S, S]), what `whole`
    names, and what is no tensor reach each microbatch as they are.

    Raises: ShapeError `no-inputs`, `indivisible-batch`.
    """
    tensors = [leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not tensors:
        raise ShapeError(Problem("no-inputs", "the step was given no tensor", fix="step(input_ids=..., targets=...)"))
    batch = tensors[0].shape[0]
    if batch % count or not batch:
        divisors = [str(n) for n in range(1, batch + 1) if batch % n == 0]
        what = f"a batch of {batch} rows cannot be cut into {count} microbatches"
        fix = f"with this batch: {', '.join(divisors) or 'none'} microbatches; or a batch of a multiple of {count} rows"
        raise ShapeError(Problem("indivisible-batch", what, fix=fix))
    rows = batch // count

    def part(value: Any, n: int) -> Any:
        def cut(leaf: Any) -> Any:
            split = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == batch
            return leaf.narrow(0, n * rows, rows) if split else leaf

        return private.tree_map(cut, value)

    return [
        Feed(
            tuple(part(arg, n) for arg in args),
            {key: value if key in whole else part(value, n) for key, value in kwargs.items()},
            targets if "targets" in whole else part(targets, n),
            n * rows,
            rows,
            batch,
        )
        for n in range(count)
    ]


def share(value: Any, group: Group, device: torch.device, source: int = 0) -> Any:
    """A nested value of the group's rank `source`, on every rank. A collective."""
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
    for place, tensor in enumerate(tensors):
        tensors[place] = tensor = tensor.to(device).contiguous()
        group.broadcast(tensor, source)
    parts = iter(tensors)
    return form.fill(lambda _: next(parts))
