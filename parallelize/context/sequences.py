"""Rows of a sequence by hand, for what does not pass through the model's own call: targets, embeddings, logits."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from torch import nn

from parallelize import _torch_private as private
from parallelize.context.inputs import next_tokens, take
from parallelize.context.rows import SequenceRows
from parallelize.context.state import Context, context_of
from parallelize.errors import ModelError, Problem, ShapeError
from parallelize.ops import collectives as ops

T = torch.Tensor

__all__ = ["gather_sequence", "next_tokens", "own_targets", "split_sequence"]


def split_sequence(model: Any, x: T, dim: int = 1) -> T:
    """This rank's rows of a whole sequence, as the model's own call takes them.

    Shapes: x [.., S, ..], the same on every rank of cp; returns [.., own rows, ..]. No communication; the gradient of `x` is
    this rank's part of it.

    Args:
        model: on `cp`, or a `ParallelModel`. One that is not gets `x` back.
    """
    context = _context(model)
    return x if context is None else take(x, context.rows(x.shape[dim]), context.group.rank, dim)


def gather_sequence(model: Any, x: T, dim: int = 1, full: int | None = None) -> T:
    """Rows of all ranks of cp, in the order of the sequence: one all-gather. The gradient is to be the same on every rank.

    Shapes: x [.., own rows, ..]; returns [.., S, ..].

    Args:
        full: S. Default: that of the model's last forward.

    Raises: ShapeError `wrong-rows`; ModelError `outside-context` where no length is known.
    """
    context = _context(model)
    if context is None:
        return x
    full = full or context.length
    if not full:
        what = "the length of the sequence is not known: no forward has run"
        raise ModelError(Problem("outside-context", what, fix="gather_sequence(..., full=S)"))
    rows, dim = context.rows(full), dim % x.ndim
    counts = [sum(b - a for a, b in rows.of_rank(rank)) for rank in range(rows.size)]
    if x.shape[dim] != counts[context.group.rank]:
        what = f"{x.shape[dim]} rows in dim {dim}, and this rank holds {counts[context.group.rank]} of {full}"
        raise ShapeError(Problem("wrong-rows", what, fix="give `full`, or another dim"))
    most = max(counts)
    gathered = ops.gather(ops.pad_to(x, dim, most), context.group, dim, most * rows.size, "replicate")
    return gathered.index_select(dim, torch.tensor(_padded_places(rows, counts, most), device=x.device))


def _padded_places(rows: SequenceRows, counts: list[int], most: int) -> list[int]:
    """Where each row of the sequence stands among ranks' rows, each padded to `most`."""
    edges = [sum(counts[:rank]) for rank in range(len(counts))]
    return [place + (most * (rank := bisect_right(edges, place) - 1) - edges[rank]) for place in rows.in_order()]


def own_targets(context: Context, full: int, targets: Any) -> Any:
    """This rank's rows of every tensor [batch, full, ..] among the targets of a step.

    Raises: ShapeError `wrong-rows` for targets of another form, which no rank has a part of.
    """

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, T):
            return leaf
        if leaf.ndim < 2 or leaf.shape[1] != full:
            what = f"targets {list(leaf.shape)} for sequences of {full} rows over cp"
            raise ShapeError(Problem("wrong-rows", what, fix=f"a target for each row: [batch, {full}, ..]"))
        return take(leaf, context.rows(full), context.group.rank, 1)

    return private.tree_map(cut, targets)


def _context(model: Any) -> Context | None:
    module = model if isinstance(model, nn.Module) else model.module
    return context_of(module)
