"""Ulysses: exchange a shard of the sequence for a shard of the heads before attention, and back after it.

    exchange [.., all of split, .., local rows of concat, ..] -> [.., local slice of split, .., all rows of concat, ..]
    fold       its adjoint: the reverse, where slices that overlap are summed

`cuts` are the slices of the split dim that the ranks get. They may overlap (a key head that several ranks need goes to
each of them, and its gradients are summed), be uneven, or be empty. `sizes` are the rows of each rank.

On DTensors `parallelize::ulysses_exchange` is the identity of the full tensor: Shard(concat) becomes Shard(split).

Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Shard

from parallelize.base.errors import Problem, ShapeError
from parallelize.base.layout import Interval, even_interval
from parallelize.comm.groups import Group
from parallelize.ops import replay_cache
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.library import LIBRARY, NAMESPACE, define, fake

T = torch.Tensor


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank attends with.

    Attributes:
        queries: [start, stop) of the query heads of each rank, split evenly.
        keys: [start, stop) of the key heads that these query heads read.
    """

    queries: tuple[Interval, ...]
    keys: tuple[Interval, ...]

    @property
    def each(self) -> int:
        """Query heads per key head."""
        return self.queries[-1][1] // max(1, max(stop for _, stop in self.keys))

    @classmethod
    def of(cls, num_heads: int, num_key_heads: int, size: int) -> HeadSplit:
        """Split whole groups of query heads that share a key head if there are enough, else single query heads.

        Raises: ShapeError `uneven-groups`.
        """
        if num_heads % num_key_heads:
            what = f"{num_heads} query heads cannot share {num_key_heads} key heads"
            raise ShapeError(Problem("uneven-groups", what, fix="a multiple of the key heads"))
        each = num_heads // num_key_heads
        if num_key_heads >= size:
            keys = tuple(even_interval(num_key_heads, size, rank) for rank in range(size))
            return cls(tuple((start * each, stop * each) for start, stop in keys), keys)
        queries = tuple(even_interval(num_heads, size, rank) for rank in range(size))
        return cls(queries, tuple((a // each, -(-b // each)) if a < b else (0, 0) for a, b in queries))


def exchange(x: T, group: Group, split: int, cuts: Sequence[Interval], concat: int, sizes: Sequence[int]) -> T:
    """Send each rank its slice of dim `split`, and receive this rank's slice of the rows of all ranks, in rank order.

    Args:
        x: all of dim `split`, this rank's rows of dim `concat`.
        group: the ranks that exchange.
        split: the dim of which each rank gets a slice.
        cuts: [start, stop) of each rank's slice of dim `split`; they may overlap, leave gaps, or be empty.
        concat: the dim along which the received rows are concatenated.
        sizes: rows of dim `concat` on each rank.

    Returns: this rank's slice of dim `split`, all rows of dim `concat`. Backward is `fold`.
    Raises: ShapeError `wrong-cuts`.
    Cost: one all-to-all forward, one backward.
    """
    split, concat = split % x.ndim, concat % x.ndim
    _check(x, group, split, cuts, concat, sizes)
    return x if group.size == 1 else _ExchangeFunction.apply(x, group, split, _flattened(cuts), concat, list(sizes))


def _check(x: T, group: Group, split: int, cuts: Sequence[Interval], concat: int, sizes: Sequence[int]) -> None:
    wrong = ""
    if split == concat:
        wrong = f"split and concat are both dim {split}"
    elif len(cuts) != group.size or len(sizes) != group.size:
        wrong = f"{len(cuts)} cuts and {len(sizes)} sizes for {group.size} ranks"
    elif any(not 0 <= start <= stop <= x.shape[split] for start, stop in cuts):
        wrong = f"cuts {list(cuts)} of a dim of {x.shape[split]}"
    elif sizes[group.rank] != x.shape[concat]:
        wrong = f"this rank has {x.shape[concat]} rows, but `sizes` says {sizes[group.rank]}"
    if wrong:
        raise ShapeError(Problem("wrong-cuts", f"exchange of {list(x.shape)}: {wrong}"))


def to_head_shards(q: T, k: T, v: T, group: Group, heads: HeadSplit, sizes: Sequence[int]) -> tuple[T, T, T]:
    """Exchange sequence shards for head shards: [B, H, local tokens, D] -> [B, local heads, all tokens, D].

    Keys and values are one message. If this rank's query heads end inside a group that shares a key head, each query
    head gets its own copy of the key head.

    Args:
        sizes: tokens of each rank.
    """
    width = k.shape[3]
    q = exchange(q, group, 1, heads.queries, 2, sizes)
    k, v = exchange(torch.cat([k, v], -1), group, 1, heads.keys, 2, sizes).split([width, v.shape[3]], -1)
    (start, stop), (first, last), each = heads.queries[group.rank], heads.keys[group.rank], heads.each
    if first == last or (start == first * each and stop == last * each):
        return q, k, v
    key_heads = torch.arange(start, stop, device=q.device) // each - first
    return q, k.index_select(1, key_heads), v.index_select(1, key_heads)


def to_sequence_shards(out: T, group: Group, heads: HeadSplit, sizes: Sequence[int]) -> T:
    """The reverse of `to_head_shards`: [B, local heads, all tokens, D] -> [B, H, local tokens, D]."""
    edges = [0, *accumulate(sizes)]
    head_counts = [stop - start for start, stop in heads.queries]
    return exchange(out.contiguous(), group, 2, list(pairwise(edges)), 1, head_counts)


class _ExchangeFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: T, group: Group, split: int, cuts: list[int], concat: int, sizes: list[int]) -> T:
        ctx.args = split, cuts, concat, sizes, x.shape[split], group.key
        op = torch.ops.parallelize.ulysses_exchange
        return replay_cache.run_collective("all_to_all", op, x, split, cuts, concat, sizes, group.key)

    @staticmethod
    def backward(ctx: Any, grad: T):
        refuse_double_backward()
        return torch.ops.parallelize.ulysses_fold(grad, *ctx.args), None, None, None, None, None


@define("ulysses_exchange(Tensor x, int split, int[] cuts, int concat, int[] sizes, str group) -> Tensor")
def _exchange(x: T, split: int, cuts: list[int], concat: int, sizes: list[int], group: Group) -> T:
    intervals = _intervals(cuts)
    sent = [x.narrow(split, start, stop - start).reshape(-1) for start, stop in intervals]
    start, stop = intervals[group.rank]
    shapes = [_with_sizes(x.shape, split, stop - start, concat, rows) for rows in sizes]
    received = _all_to_all(group, sent, [prod(shape) for shape in shapes])
    return torch.cat([chunk.view(shape) for chunk, shape in zip(received, shapes, strict=True)], concat)


@define("ulysses_fold(Tensor x, int split, int[] cuts, int concat, int[] sizes, int full, str group) -> Tensor")
def _fold(x: T, split: int, cuts: list[int], concat: int, sizes: list[int], full: int, group: Group) -> T:
    intervals, rows = _intervals(cuts), sizes[group.rank]
    sent = [chunk.reshape(-1) for chunk in x.split(sizes, concat)]
    shapes = [_with_sizes(x.shape, split, stop - start, concat, rows) for start, stop in intervals]
    received = _all_to_all(group, sent, [prod(shape) for shape in shapes])
    chunks = [chunk.view(shape) for chunk, shape in zip(received, shapes, strict=True)]
    if _covers_once(intervals, full):
        return torch.cat(chunks, split)
    out = x.new_zeros(_with_sizes(x.shape, split, full, concat, rows))
    for chunk, (start, stop) in zip(chunks, intervals, strict=True):
        out.narrow(split, start, stop - start).add_(chunk)
    return out


def _all_to_all(group: Group, sent: list[T], received: list[int]) -> tuple[T, ...]:
    """Flat chunks by rank; `received` are their numbers of elements."""
    out = group.all_to_all(torch.cat(sent), [chunk.numel() for chunk in sent], received)
    return out.split(received)


def _covers_once(intervals: list[Interval], full: int) -> bool:
    """Whether the intervals, in order, cover [0, full) without gaps or overlaps."""
    adjacent = all(a[1] == b[0] for a, b in pairwise(intervals))
    return intervals[0][0] == 0 and intervals[-1][1] == full and adjacent


def _flattened(intervals: Sequence[Interval]) -> list[int]:
    return [edge for interval in intervals for edge in interval]


def _intervals(flat: list[int]) -> list[Interval]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _with_sizes(shape: Sequence[int], split: int, split_size: int, concat: int, concat_size: int) -> list[int]:
    out = list(shape)
    out[split], out[concat] = split_size, concat_size
    return out


@fake("ulysses_exchange")
def _(x, split, cuts, concat, sizes, group):
    start, stop = _intervals(cuts)[Group.by_key(group).rank]
    return x.new_empty(_with_sizes(x.shape, split, stop - start, concat, sum(sizes)))


@fake("ulysses_fold")
def _(x, split, cuts, concat, sizes, full, group):
    return x.new_empty(_with_sizes(x.shape, split, full, concat, sizes[Group.by_key(group).rank]))


# -- on DTensors ------------------------------------------------------------------------------------------------------


def exchange_shards(x: DTensor, split: int, axis: int = 0) -> DTensor:
    """Shard a DTensor along dim `split` instead of the dim along which it is sharded on a mesh axis.

    Args:
        x: a DTensor that is sharded on mesh axis number `axis`.
        split: a dim along which `x` is not sharded on any axis.

    Raises: ShapeError `wrong-placement`.
    Cost: one all-to-all forward, one backward.
    """
    placement, split = x.placements[axis], split % x.ndim
    taken = any(other.is_shard(split) for other in x.placements)
    if not isinstance(placement, Shard) or taken:
        what = f"{x.placements}, and dim {split} is to be sharded on axis {axis} instead"
        raise ShapeError(Problem("wrong-placement", what, fix="a DTensor sharded there along another dim"))
    concat, group = placement.dim % x.ndim, Group(x.device_mesh.get_group(axis))
    full = list(x.shape)
    for n, other in enumerate(x.placements):  # other axes may shard other dims
        if n != axis and isinstance(other, Shard):
            full[other.dim] = x.to_local().shape[other.dim]
    cuts = [even_interval(full[split], group.size, rank) for rank in range(group.size)]
    rows = [even_interval(full[concat], group.size, rank) for rank in range(group.size)]
    sizes = [stop - start for start, stop in rows]
    out = exchange(x.to_local(), group, split, cuts, concat, sizes)
    placements = [Shard(split) if n == axis else other for n, other in enumerate(x.placements)]
    return DTensor.from_local(out, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def _rule(cls: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """The op on a DTensor, whose layout determines everything but the dims."""
    x, split, _, concat, *_ = args
    axes = [n for n, placement in enumerate(x.placements) if placement.is_shard(concat)]
    if len(axes) != 1:
        what = f"ulysses_exchange of {x.placements} along dim {concat}"
        raise ShapeError(Problem("wrong-placement", what, fix=f"Shard({concat}) on one axis"))
    return exchange_shards(x, split, axes[0])


torch.library.register_torch_dispatch(f"{NAMESPACE}::ulysses_exchange", DTensor, _rule, lib=LIBRARY)
