"""Ulysses: a shard of the sequence traded for a shard of heads before attention, and back after it.

    exchange   [.., all of split, .., own rows of concat, ..] -> [.., own cut of split, .., all rows of concat, ..]
    fold       its adjoint: back again, and what several ranks were given is summed

`cuts` names the part of the split dim that each rank gets. Cuts may overlap (a key head that several ranks need goes to each of
them, and its gradients are summed where they meet), be uneven, or be empty. `sizes` are the rows of each rank.

On DTensors `parallelize::ulysses_exchange` means the identity: Shard(concat) becomes Shard(split).

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

from parallelize.errors import Problem, ShapeError
from parallelize.groups import Group
from parallelize.layout import even_interval
from parallelize.ops import tape
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.library import LIBRARY, NAMESPACE, define, fake

T = torch.Tensor
Cut = tuple[int, int]


@dataclass(frozen=True)
class HeadCut:
    """Which heads each rank attends with. `queries` are dealt out evenly; `keys` are those that its queries read."""

    queries: tuple[Cut, ...]
    keys: tuple[Cut, ...]

    @property
    def each(self) -> int:
        """Query heads a key head."""
        return self.queries[-1][1] // max(1, max(stop for _, stop in self.keys))

    @classmethod
    def of(cls, num_heads: int, num_key_heads: int, size: int) -> HeadCut:
        """Whole groups of queries that share a key head, where there are enough of them; else single query heads.

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


def exchange(x: T, group: Group, split: int, cuts: Sequence[Cut], concat: int, sizes: Sequence[int]) -> T:
    """Give each rank its cut of dim `split` of own rows, and get own cut of everybody's rows, in rank order.

    Args:
        x: all of dim `split`, this rank's rows of dim `concat`.
        cuts: of dim `split`, one a rank. sizes: rows of dim `concat`, one a rank.

    Cost: one all-to-all forward, one backward.
    Raises: ShapeError `wrong-cuts`.
    """
    split, concat = split % x.ndim, concat % x.ndim
    _check(x, group, split, cuts, concat, sizes)
    return x if group.size == 1 else _Exchange.apply(x, group, split, _flat(cuts), concat, list(sizes))


def _check(x: T, group: Group, split: int, cuts: Sequence[Cut], concat: int, sizes: Sequence[int]) -> None:
    wrong = ""
    if split == concat:
        wrong = f"dims {split} and {concat} are one"
    elif len(cuts) != group.size or len(sizes) != group.size:
        wrong = f"{len(cuts)} cuts and {len(sizes)} sizes for {group.size} ranks"
    elif any(not 0 <= start <= stop <= x.shape[split] for start, stop in cuts):
        wrong = f"cuts {list(cuts)} of a dim of {x.shape[split]}"
    elif sizes[group.rank] != x.shape[concat]:
        wrong = f"this rank has {x.shape[concat]} rows, and {sizes[group.rank]} are named"
    if wrong:
        raise ShapeError(Problem("wrong-cuts", f"exchange of {list(x.shape)}: {wrong}"))


def to_heads(q: T, k: T, v: T, group: Group, heads: HeadCut, rows: Sequence[int]) -> tuple[T, T, T]:
    """Own heads of everybody's rows: [B, H, own rows, D] -> [B, own heads, all rows, D]. Keys and values go as one message.

    Where own queries end within a group that shares a key head, each query head gets a key head of its own.
    """
    width = k.shape[3]
    q = exchange(q, group, 1, heads.queries, 2, rows)
    k, v = exchange(torch.cat([k, v], -1), group, 1, heads.keys, 2, rows).split([width, v.shape[3]], -1)
    (start, stop), (first, last), each = heads.queries[group.rank], heads.keys[group.rank], heads.each
    if first == last or (start == first * each and stop == last * each):
        return q, k, v
    which = torch.arange(start, stop, device=q.device) // each - first
    return q, k.index_select(1, which), v.index_select(1, which)


def to_rows(out: T, group: Group, heads: HeadCut, rows: Sequence[int]) -> T:
    """All heads of own rows: the way back of `to_heads`."""
    edges = [0, *accumulate(rows)]
    sizes = [stop - start for start, stop in heads.queries]
    return exchange(out.contiguous(), group, 2, list(pairwise(edges)), 1, sizes)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: T, group: Group, split: int, cuts: list[int], concat: int, sizes: list[int]) -> T:
        ctx.args = split, cuts, concat, sizes, x.shape[split], group.key
        return tape.sent("all_to_all", torch.ops.parallelize.ulysses_exchange, x, split, cuts, concat, sizes, group.key)

    @staticmethod
    def backward(ctx: Any, grad: T):
        refuse_double_backward()
        return torch.ops.parallelize.ulysses_fold(grad, *ctx.args), None, None, None, None, None


@define("ulysses_exchange(Tensor x, int split, int[] cuts, int concat, int[] sizes, str group) -> Tensor")
def _exchange(x: T, split: int, cuts: list[int], concat: int, sizes: list[int], team: Group) -> T:
    pairs = _pairs(cuts)
    sent = [x.narrow(split, start, stop - start).reshape(-1) for start, stop in pairs]
    start, stop = pairs[team.rank]
    shapes = [_with(x.shape, split, stop - start, concat, rows) for rows in sizes]
    received = _traded(team, sent, [prod(shape) for shape in shapes])
    return torch.cat([part.view(shape) for part, shape in zip(received, shapes, strict=True)], concat)


@define("ulysses_fold(Tensor x, int split, int[] cuts, int concat, int[] sizes, int full, str group) -> Tensor")
def _fold(x: T, split: int, cuts: list[int], concat: int, sizes: list[int], full: int, team: Group) -> T:
    pairs, rows = _pairs(cuts), sizes[team.rank]
    sent = [part.reshape(-1) for part in x.split(sizes, concat)]
    shapes = [_with(x.shape, split, stop - start, concat, rows) for start, stop in pairs]
    received = _traded(team, sent, [prod(shape) for shape in shapes])
    parts = [part.view(shape) for part, shape in zip(received, shapes, strict=True)]
    if _tiled(pairs, full):
        return torch.cat(parts, split)
    out = x.new_zeros(_with(x.shape, split, full, concat, rows))
    for part, (start, stop) in zip(parts, pairs, strict=True):
        out.narrow(split, start, stop - start).add_(part)
    return out


def _traded(team: Group, sent: list[T], received: list[int]) -> tuple[T, ...]:
    flat = team.all_to_all(torch.cat(sent), [part.numel() for part in sent], received)
    return flat.split(received)


def _tiled(pairs: list[Cut], full: int) -> bool:
    """Whether cuts, in order, are the whole without gaps or overlaps."""
    return pairs[0][0] == 0 and pairs[-1][1] == full and all(a[1] == b[0] for a, b in pairwise(pairs))


def _flat(cuts: Sequence[Cut]) -> list[int]:
    return [edge for cut in cuts for edge in cut]


def _pairs(flat: list[int]) -> list[Cut]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _with(shape: Sequence[int], split: int, one: int, concat: int, other: int) -> list[int]:
    out = list(shape)
    out[split], out[concat] = one, other
    return out


@fake("ulysses_exchange")
def _(x, split, cuts, concat, sizes, group):
    start, stop = _pairs(cuts)[Group.by_key(group).rank]
    return x.new_empty(_with(x.shape, split, stop - start, concat, sum(sizes)))


@fake("ulysses_fold")
def _(x, split, cuts, concat, sizes, full, group):
    return x.new_empty(_with(x.shape, split, full, concat, sizes[Group.by_key(group).rank]))


# -- on DTensors ------------------------------------------------------------------------------------------------------


def exchange_shards(x: DTensor, split: int, axis: int = 0) -> DTensor:
    """A DTensor that is sharded along one dim on a mesh axis, sharded along dim `split` instead: one all-to-all each way.

    Raises: ShapeError `wrong-placement`.
    """
    placement, split = x.placements[axis], split % x.ndim
    taken = any(one.is_shard(split) for one in x.placements)
    if not isinstance(placement, Shard) or taken:
        what = f"{x.placements}, and dim {split} is to be sharded on axis {axis} instead"
        raise ShapeError(Problem("wrong-placement", what, fix="a DTensor sharded there along another dim"))
    concat, group = placement.dim % x.ndim, Group(x.device_mesh.get_group(axis))
    whole = list(x.shape)
    for n, one in enumerate(x.placements):  # other axes may shard other dims
        if n != axis and isinstance(one, Shard):
            whole[one.dim] = x.to_local().shape[one.dim]
    cuts = [even_interval(whole[split], group.size, rank) for rank in range(group.size)]
    rows = [even_interval(whole[concat], group.size, rank) for rank in range(group.size)]
    sizes = [stop - start for start, stop in rows]
    out = exchange(x.to_local(), group, split, cuts, concat, sizes)
    placements = [Shard(split) if n == axis else one for n, one in enumerate(x.placements)]
    return DTensor.from_local(out, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def _rule(cls: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """The op on a DTensor, whose layout says all but the dims."""
    x, split, _, concat, *_ = args
    axes = [n for n, one in enumerate(x.placements) if one.is_shard(concat)]
    if len(axes) != 1:
        what = f"ulysses_exchange of {x.placements} along dim {concat}"
        raise ShapeError(Problem("wrong-placement", what, fix=f"Shard({concat}) on one axis"))
    return exchange_shards(x, split, axes[0])


torch.library.register_torch_dispatch(f"{NAMESPACE}::ulysses_exchange", DTensor, _rule, lib=LIBRARY)
