"""Where the pieces of a parameter lie: pairs of local and full slices, for every rank of `tp`.

A layout says, for each rank, which intervals of the full tensor along one dim it holds and in which order. That covers
equal and uneven shards, packed projections (several chunks, each split by itself) and replicated key/value heads (an
interval held by several ranks). Placements are derived from it: `stored_dim_size` and `is_canonical` say how a plain
`Shard(dim)` DTensor carries it.

Floor 0: pure arithmetic, torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from parallelize.errors import Problem, ShapeError

Interval = tuple[int, int]


@dataclass(frozen=True)
class Chunk:
    """A run of `units` equal blocks along the sharded dim, which are never cut.

    `units=None`: any element may be a boundary. `replicable`: with fewer units than ranks, each unit goes to several
    ranks (key/value heads); otherwise that is an error.
    """

    size: int
    units: int | None = None
    replicable: bool = False
    name: str = ""


@dataclass(frozen=True)
class SlicePair:
    """The same elements, seen from the rank and from the whole. One slice a dim."""

    local: tuple[slice, ...]
    full: tuple[slice, ...]


@dataclass(frozen=True)
class Layout:
    """How one parameter lies over the ranks of one axis.

    `owned[r]` are the intervals of the full dim that rank r holds, in the order in which they lie in its memory.
    `dim is None` means that every rank holds all of it.
    """

    shape: tuple[int, ...]
    num_ranks: int
    dim: int | None = None
    owned: tuple[tuple[Interval, ...], ...] = ()
    chunks: tuple[Chunk, ...] = field(
        default=(), compare=False
    )  # what `owned` was cut from, for other numbers of ranks

    def local_size(self, rank: int) -> int:
        """Elements along `dim` on this rank (the whole first dim's size has no meaning when replicated)."""
        assert self.dim is not None
        return sum(stop - start for start, stop in self.owned[rank])

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape that the rank computes with."""
        if self.dim is None:
            return self.shape
        return self._with_dim(self.local_size(rank))

    def slices(self, rank: int) -> tuple[SlicePair, ...]:
        """The pairs of local and full slices on this rank, in memory order. Empty where the rank holds nothing."""
        if self.dim is None:
            whole = tuple(slice(0, size) for size in self.shape)
            return (SlicePair(whole, whole),)
        pairs, at = [], 0
        for start, stop in self.owned[rank]:
            pairs.append(SlicePair(self._cut(at, at + stop - start), self._cut(start, stop)))
            at += stop - start
        return tuple(pairs)

    def holders(self, interval: Interval) -> tuple[int, ...]:
        """The ranks that hold exactly this interval."""
        return tuple(rank for rank, owned in enumerate(self.owned) if interval in owned)

    def shared(self, rank: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """(local start, local stop, ranks) of what this rank holds together with others: gradients there are summed."""
        if self.dim is None:
            return ()
        found, at = [], 0
        for start, stop in self.owned[rank]:
            ranks = self.holders((start, stop))
            if len(ranks) > 1:
                found.append((at, at + stop - start, ranks))
            at += stop - start
        return tuple(found)

    @cached_property
    def is_canonical(self) -> bool:
        """Whether a plain DTensor (`Shard(dim)` cut as `torch.chunk` cuts, or `Replicate`) is this layout itself."""
        return self.dim is None or self == chunked(self.shape, self.dim, self.num_ranks)

    @cached_property
    def stored_local_size(self) -> int:
        """Rows that each rank stores when the layout is not canonical: the largest local size, so that shards are even."""
        return max(self.local_size(rank) for rank in range(self.num_ranks))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The DTensor's global shape: the full shape, or an even one that holds permuted, shared or padded shards."""
        if self.dim is None or self.is_canonical:
            return self.shape
        return self._with_dim(self.stored_local_size * self.num_ranks)

    def _with_dim(self, size: int) -> tuple[int, ...]:
        assert self.dim is not None
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def _cut(self, start: int, stop: int) -> tuple[slice, ...]:
        return tuple(slice(start, stop) if dim == self.dim else slice(0, size) for dim, size in enumerate(self.shape))


def replicated(shape: Sequence[int], num_ranks: int) -> Layout:
    """Every rank holds all of it."""
    return Layout(tuple(shape), num_ranks)


def chunked(shape: Sequence[int], dim: int, num_ranks: int) -> Layout:
    """Contiguous shards as `torch.chunk` cuts them: ceil(size / ranks) each, the last ones smaller or empty."""
    size = shape[dim]
    owned = tuple(filled(even_interval(size, num_ranks, rank)) for rank in range(num_ranks))
    return Layout(tuple(shape), num_ranks, dim, owned, (Chunk(size),))


def packed(shape: Sequence[int], dim: int, num_ranks: int, chunks: Sequence[Chunk]) -> Layout:
    """Each chunk is split over the ranks by itself; a rank holds its parts one after another.

    Raises: ShapeError `uneven-units` where units can be neither divided nor replicated.
    """
    owned = []
    for rank in range(num_ranks):
        intervals: list[Interval] = []
        at = 0
        for chunk in chunks:
            start, stop = _part(chunk, num_ranks, rank)
            intervals += filled((at + start, at + stop))
            at += chunk.size
        owned.append(tuple(intervals))
    return Layout(tuple(shape), num_ranks, dim, tuple(owned), tuple(chunks))


def even_interval(size: int, num_ranks: int, rank: int) -> Interval:
    """Rank's part of `size` elements as `torch.chunk` cuts them."""
    step = -(-size // num_ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def filled(interval: Interval) -> tuple[Interval, ...]:
    return (interval,) if interval[1] > interval[0] else ()


def local_units(units: int, num_ranks: int, replicable: bool) -> int | None:
    """Units that each rank holds, or None where they can be neither divided nor replicated."""
    if units % num_ranks == 0:
        return units // num_ranks
    return 1 if replicable and num_ranks % units == 0 else None


def _part(chunk: Chunk, num_ranks: int, rank: int) -> Interval:
    if chunk.units is None:
        return even_interval(chunk.size, num_ranks, rank)
    per_rank = local_units(chunk.units, num_ranks, chunk.replicable)
    if per_rank is None:
        raise ShapeError(Problem("uneven-units", f"{chunk.units} {chunk.name or 'units'} over {num_ranks} ranks"))
    width = chunk.size // chunk.units
    first = rank * chunk.units // num_ranks
    return first * width, (first + per_rank) * width
