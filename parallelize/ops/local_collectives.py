"""Collectives with their gradients, for layers of your own: each is a function of plain local tensors and a group.

    forward                                                      backward
    copy            x replicated      -> x                       sum over ranks
    reduce          parts of a sum    -> their sum               identity
    sum_both        parts of a sum    -> their sum               sum over ranks
    gather          [.., s, ..]       -> [.., S, ..]             reduce-scatter, or this rank's part
    reduce_scatter  parts [.., S, ..] -> [.., s, ..]             all-gather
    split           [.., S, ..]       -> [.., s, ..]             all-gather
    all_to_all      [.., S, .., t, ..] -> [.., s, .., T, ..]     the reverse

S is the full size of any dim, s this rank's part of it as `torch.chunk` splits it: ranks at the end may have less, or
nothing. Under `torch.compile` and in a captured CUDA graph ranks cannot ask each other for their parts: pass `full`
where they are uneven. A group is a 1-D DeviceMesh, such as `mesh["tp"]`, or a process group. All its ranks call the
same function with tensors of one dtype. The gradients are those of the unsharded computation: nothing is scaled by the
number of ranks. They have no second derivatives (ModelError `double-backward`). On a group of one rank every function
is the identity.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198 (sequence parallelism);
Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509 (all-to-all).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem, ShapeError
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group, GroupOrMesh, group_of
from parallelize.comm.handshake import over_ranks
from parallelize.ops import collectives as ops

__all__ = ["all_to_all", "copy", "gather", "reduce", "reduce_scatter", "split", "sum_both"]


def copy(x: torch.Tensor, group: GroupOrMesh) -> torch.Tensor:
    """Pass a replicated tensor to a computation that each rank does a part of: the input of column-parallel layers.

    Args:
        x: any shape, the same values on every rank.
        group: a 1-D mesh or a process group.

    Returns: `x`.
    Backward: the sum of the ranks' gradients.
    Raises: ModelError `not-local` for a DTensor; MeshError `several-axes` for a mesh of more dims.
    Cost: one all-reduce of the gradient.
    """
    return ops.copy(_local(x), group_of(group))


def reduce(x: torch.Tensor, group: GroupOrMesh) -> torch.Tensor:
    """Sum partial results, of which all ranks then compute the same: the output of row-parallel layers.

    Args:
        x: any shape, this rank's part of the sum.
        group: a 1-D mesh or a process group.

    Returns: the sum, on every rank.
    Backward: the gradient itself, which is the same on every rank.
    Raises: ModelError `not-local`; MeshError `several-axes`.
    Cost: one all-reduce.
    """
    return ops.reduce(_local(x), group_of(group))


def sum_both(x: torch.Tensor, group: GroupOrMesh) -> torch.Tensor:
    """Sum partial results that each rank then uses differently, such as a mean that scales each rank's own features.

    Args:
        x: any shape, this rank's part of the sum.
        group: a 1-D mesh or a process group.

    Returns: the sum, on every rank.
    Backward: the sum of the ranks' gradients.
    Raises: ModelError `not-local`; MeshError `several-axes`.
    Cost: two all-reduces, one of them of the gradient.
    """
    return ops.sum_both(_local(x), group_of(group))


def gather(
    x: torch.Tensor,
    group: GroupOrMesh,
    dim: int = -1,
    *,
    gradient: Literal["partial", "replicate"],
    full: int | None = None,
) -> torch.Tensor:
    """All ranks' parts of a dim, one after the other.

    Args:
        x: [.., s, ..], this rank's part.
        group: a 1-D mesh or a process group.
        dim: the dim that is sharded. Default: the last.
        gradient: what the gradient of the result is on each rank. "partial": each rank uses the result for a
            computation of its own, and the gradient is the sum of theirs. "replicate": all ranks compute the same with
            it, and each has the gradient.
        full: the size S of `dim` over all ranks. Default: the sum of their parts, which they tell each other first.

    Returns: [.., S, ..], on every rank.
    Backward: the sum over ranks of this rank's part of the gradient ("partial"), or this rank's part of its own
        ("replicate").
    Raises: ShapeError `not-a-shard`, on every rank, if the parts are not those of `torch.chunk`; with `full` only on
        ranks whose s is not their part of it, for which the others wait; `no-such-dim`; ModelError `not-local`;
        MeshError `several-axes`.
    Cost: one all-gather; without `full` another of 8 bytes, which the host waits for; backward a reduce-scatter, or
        nothing.
    """
    joined = group_of(group)
    dim = _dim(_local(x), dim)
    return ops.gather(x, joined, dim, _full(x, joined, dim, full), gradient)


def reduce_scatter(x: torch.Tensor, group: GroupOrMesh, dim: int = -1) -> torch.Tensor:
    """Sum partial results and keep this rank's part of a dim: the output of row-parallel layers under sequence
    parallelism.

    Args:
        x: [.., S, ..], this rank's part of the sum.
        group: a 1-D mesh or a process group.
        dim: the dim to shard. Default: the last.

    Returns: [.., s, ..], the sum.
    Backward: all ranks' gradients, one after the other.
    Raises: ShapeError `no-such-dim`; ModelError `not-local`; MeshError `several-axes`.
    Cost: one reduce-scatter; backward an all-gather.
    """
    return ops.reduce_scatter(_local(x), group_of(group), _dim(x, dim))


def split(x: torch.Tensor, group: GroupOrMesh, dim: int = -1) -> torch.Tensor:
    """This rank's part of a replicated tensor.

    Args:
        x: [.., S, ..], the same on every rank.
        group: a 1-D mesh or a process group.
        dim: the dim to shard. Default: the last.

    Returns: [.., s, ..].
    Backward: all ranks' gradients, one after the other.
    Raises: ShapeError `no-such-dim`; ModelError `not-local`; MeshError `several-axes`.
    Cost: nothing; backward an all-gather.
    """
    return ops.split(_local(x), group_of(group), _dim(x, dim))


def all_to_all(
    x: torch.Tensor, group: GroupOrMesh, split: int = 2, concat: int = 1, *, full: int | None = None
) -> torch.Tensor:
    """Shard one dim instead of another. The defaults are those of attention: [batch, tokens, heads, ..] with this
    rank's tokens becomes all tokens with this rank's heads. `all_to_all(out, group, 1, 2)` is the way back.

    Args:
        x: [.., t, .., S, ..]: this rank's part of dim `concat`, all of dim `split`.
        group: a 1-D mesh or a process group.
        split: the dim to shard.
        concat: the dim that is sharded now.
        full: the size T of `concat` over all ranks. Default: the sum of their parts, which they tell each other first.

    Returns: [.., T, .., s, ..].
    Backward: the reverse.
    Raises: ShapeError `not-a-shard`, on every rank, if the parts are not those of `torch.chunk`; with `full` only on
        ranks whose t is not their part of it, for which the others wait; `no-such-dim`, `same-dim` if both dims are
        one; ModelError `not-local`; MeshError `several-axes`.
    Cost: one all-to-all; without `full` also an all-gather of 8 bytes, which the host waits for; backward another
        all-to-all.
    """
    joined = group_of(group)
    split, concat = _dim(_local(x), split), _dim(x, concat)
    if split == concat:
        what = f"dim {split} is to be sharded and is sharded already"
        raise ShapeError(Problem("same-dim", what, fix="name two dims"))
    return ops.all_to_all(x, joined, split, concat, _full(x, joined, concat, full))


def _local(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, DTensor):
        what = f"a DTensor of {x.placements} was given to a collective of local tensors"
        raise ModelError(Problem("not-local", what, fix="x.redistribute(placements=...); or pass x.to_local()"))
    return x


def _dim(x: torch.Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(
            Problem("no-such-dim", f"dim {dim} of a tensor of shape {list(x.shape)}", fix="name one of its dims")
        )
    return dim % x.ndim


def _full(x: torch.Tensor, group: Group, dim: int, full: int | None) -> int:
    """The size of `dim` over all ranks; `x` must have this rank's part of it."""
    if full is None:
        return _sum_of_parts(over_ranks(group, x.shape[dim], x.device), dim)
    start, stop = even_interval(full, group.size, group.rank)
    if x.shape[dim] != stop - start:
        what = f"dim {dim} has {x.shape[dim]} elements; rank {group.rank} of {group.size} has {stop - start} of {full}"
        raise ShapeError(Problem("not-a-shard", what, fix="shard as torch.chunk does (`split`), or pass the full size"))
    return full


def _sum_of_parts(parts: list[int], dim: int) -> int:
    """The full size of a dim of which each rank has a part. All ranks have the same list, so all raise or none."""
    full = sum(parts)
    expected = [stop - start for start, stop in (even_interval(full, len(parts), rank) for rank in range(len(parts)))]
    if parts != expected:
        what = f"the ranks have {parts} elements of dim {dim}; of {full}, torch.chunk gives them {expected}"
        raise ShapeError(Problem("not-a-shard", what, fix="shard as torch.chunk does (`split`)"))
    return full
