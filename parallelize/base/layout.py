"""How a parameter is sharded over the ranks of `tp`: pairs of local and full slices for every rank.

A layout says which intervals of the full tensor along one dim each rank stores, and in which order. That covers even
and uneven shards, packed weights (several chunks, each sharded by itself) and replicated key/value heads (an interval
that several ranks store). Placements are derived from it: `is_canonical` and `stored_shape` say which `Shard(dim)`
DTensor stores it.

Floor 0: pure arithmetic, torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from parallelize.base.boxes import Box, box_of, intersection, relative_to, slices_of, starts
from parallelize.base.errors import Problem, ShapeError

Interval = tuple[int, int]


@dataclass(frozen=True)
class Chunk:
    """A part of the sharded dim that is sharded by itself, such as the q of a packed q, k and v.

    Attributes:
        size: elements along the dim.
        units: the number of equal blocks in it that are never split, such as heads; None: any element may be a
            boundary.
        replicable: whether each unit may be stored by several ranks if there are fewer units than ranks (key/value
            heads).
        name: what a unit is called in error messages.
        adjacent: without units, the number of elements between which there is no boundary.
    """

    size: int
    units: int | None = None
    replicable: bool = False
    name: str = ""
    adjacent: int = 1


@dataclass(frozen=True)
class SlicePair:
    """The same elements as slices of a rank's local tensor and as slices of the full tensor. One slice for each dim."""

    local: tuple[slice, ...]
    full: tuple[slice, ...]

    @property
    def box(self) -> Box:
        """Its elements as a box of the full tensor."""
        return box_of(self.full)

    def within(self, box: Box) -> SlicePair | None:
        """The part whose elements are in a box of the full tensor; None where there is none."""
        shared = intersection(self.box, box)
        if shared is None:
            return None
        inside = relative_to(shared, starts(self.box))
        local = (slice(side.start + a, side.start + b) for side, (a, b) in zip(self.local, inside, strict=True))
        return SlicePair(tuple(local), slices_of(shared))

    def in_window(self, window: Sequence[Interval]) -> SlicePair | None:
        """The part inside a window of the local tensor, relative to the window; None where it is empty."""
        shared = intersection(box_of(self.local), tuple(window))
        if shared is None:
            return None
        inside = relative_to(shared, starts(box_of(self.local)))
        full = (slice(side.start + a, side.start + b) for side, (a, b) in zip(self.full, inside, strict=True))
        return SlicePair(slices_of(relative_to(shared, [first for first, _ in window])), tuple(full))


@dataclass(frozen=True)
class Layout:
    """How one parameter is sharded over the ranks of one axis.

    Attributes:
        shape: the shape of the full tensor.
        num_ranks: the number of ranks of the axis.
        dim: the sharded dim; None: every rank stores the full tensor.
        owned: for each rank, the intervals of the full dim that it stores, in memory order.
        rows: for each rank, the interval of dim 0 of which it stores these intervals, where `dim` is another; empty:
            all of it.
        chunks: what `owned` was computed from, to compute it for another number of ranks.
    """

    shape: tuple[int, ...]
    num_ranks: int
    dim: int | None = None
    owned: tuple[tuple[Interval, ...], ...] = ()
    rows: tuple[Interval, ...] = ()
    chunks: tuple[Chunk, ...] = field(default=(), compare=False)

    def local_size(self, rank: int) -> int:
        """The number of elements along `dim` that `rank` stores. A replicated layout has no `dim` and no local size."""
        assert self.dim is not None
        return sum(stop - start for start, stop in self.owned[rank])

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the local tensor that `rank` computes with."""
        if self.dim is None:
            return self.shape
        return self._with_dim(self.local_size(rank), rank)

    @property
    def sharded_dims(self) -> tuple[int, ...]:
        """The dims along which ranks store different elements."""
        return () if self.dim is None else (0, self.dim) if self.rows else (self.dim,)

    def slices(self, rank: int) -> tuple[SlicePair, ...]:
        """The pairs of local and full slices of `rank`, in memory order. Empty if the rank stores nothing."""
        if self.dim is None:
            everything = tuple(slice(0, size) for size in self.shape)
            return (SlicePair(everything, everything),)
        pairs, offset = [], 0
        for start, stop in self.owned[rank]:
            local_stop = offset + stop - start
            first, last = self.rows[rank] if self.rows else (0, self.shape[0])
            local = self._slices_of(offset, local_stop, (0, last - first))
            pairs.append(SlicePair(local, self._slices_of(start, stop, (first, last))))
            offset = local_stop
        return tuple(pairs)

    def holders(self, rank: int, interval: Interval) -> tuple[int, ...]:
        """The ranks that store the elements of this `interval` of the full dim, which `rank` stores."""
        alike = (other for other in range(self.num_ranks) if not self.rows or self.rows[other] == self.rows[rank])
        return tuple(other for other in alike if interval in self.owned[other])

    def shared(self, rank: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """The intervals that `rank` and other ranks store: (local start, local stop, ranks).

        The gradient of an interval is summed over its ranks.
        """
        if self.dim is None:
            return ()
        intervals, offset = [], 0
        for start, stop in self.owned[rank]:
            ranks, local_stop = self.holders(rank, (start, stop)), offset + stop - start
            if len(ranks) > 1:
                intervals.append((offset, local_stop, ranks))
            offset = local_stop
        return tuple(intervals)

    @cached_property
    def is_canonical(self) -> bool:
        """Whether this is the layout of a plain DTensor: `Replicate`, or `Shard(dim)`, which splits as `torch.chunk`
        does."""
        return self.dim is None or self == chunked(self.shape, self.dim, self.num_ranks)

    @cached_property
    def stored_local_size(self) -> int:
        """The largest local size. If the layout is not canonical, shards are padded to it, so that they are even."""
        return max(self.local_size(rank) for rank in range(self.num_ranks))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The DTensor's full shape: `shape` if the layout is canonical, else that of the even shards together."""
        if self.dim is None or self.is_canonical:
            return self.shape
        return self._with_dim(self.stored_local_size * self.num_ranks)

    def stored_local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the local tensor that `rank` stores, with its padding."""
        if self.dim is None or self.is_canonical:
            return self.local_shape(rank)
        return self._with_dim(self.stored_local_size, rank)

    def _with_dim(self, size: int, rank: int = 0) -> tuple[int, ...]:
        """The shape with another size of `dim`, and of dim 0 what `rank` stores."""
        shape = list(self.shape)
        if self.rows:
            shape[0] = self.rows[rank][1] - self.rows[rank][0]
        assert self.dim is not None
        shape[self.dim] = size
        return tuple(shape)

    def _slices_of(self, start: int, stop: int, rows: Interval) -> tuple[slice, ...]:
        slices = [slice(0, size) for size in self.shape]
        slices[0] = slice(*rows)
        assert self.dim is not None
        slices[self.dim] = slice(start, stop)
        return tuple(slices)


def replicated(shape: Sequence[int], num_ranks: int) -> Layout:
    """Every rank stores all of it."""
    return Layout(tuple(shape), num_ranks)


def chunked(shape: Sequence[int], dim: int, num_ranks: int) -> Layout:
    """Contiguous shards as `torch.chunk` splits: ceil(size / ranks) each, the last ones smaller or empty."""
    size = shape[dim]
    owned = tuple(filled(even_interval(size, num_ranks, rank)) for rank in range(num_ranks))
    return Layout(tuple(shape), num_ranks, dim, owned, chunks=(Chunk(size),))


def repeated(
    shape: Sequence[int],
    dim: int,
    num_ranks: int,
    num_shards: int,
    unit: int = 1,
    num_chunks: int = 1,
    units: Sequence[Sequence[int]] | None = None,
) -> Layout:
    """`num_shards` balanced shards, each stored by every `num_shards`-th rank.

    Args:
        unit: elements that stay together.
        num_chunks: equal parts of the dim, of each of which a rank stores its shard.
        units: for each shard, the units that it has, ascending. Default: consecutive ones.
    """
    size = shape[dim] // num_chunks
    owned = []
    for rank in range(num_ranks):
        if units is not None:
            runs = runs_of(units[rank % num_shards])
        else:
            runs = filled(balanced_interval(size // unit, num_shards, rank % num_shards))
        offsets = range(0, shape[dim], size) if size else ()
        owned.append(tuple((n + start * unit, n + stop * unit) for n in offsets for start, stop in runs))
    return Layout(tuple(shape), num_ranks, dim, tuple(owned), chunks=(Chunk(size),) * num_chunks)


def tiled(inner: Layout, num_ranks: int, num_rows: int) -> Layout:
    """Dim 0 in `num_rows` equal intervals, each split as `inner` splits another dim. Rows change fastest with the rank.

    The tiles are stored by every `num_rows * inner.num_ranks`-th rank.
    """
    size, ranks = inner.shape[0], range(num_ranks)
    rows = tuple(balanced_interval(size, num_rows, rank % num_rows) for rank in ranks)
    owned = tuple(inner.owned[rank // num_rows % inner.num_ranks] for rank in ranks)
    return Layout(inner.shape, num_ranks, inner.dim, owned, rows, inner.chunks)


def packed(shape: Sequence[int], dim: int, num_ranks: int, chunks: Sequence[Chunk]) -> Layout:
    """Each chunk is sharded by itself; a rank stores its shards of all chunks one after another.

    Raises: ShapeError `uneven-units` where units can be neither divided nor replicated.
    """
    owned = []
    for rank in range(num_ranks):
        intervals: list[Interval] = []
        offset = 0
        for chunk in chunks:
            start, stop = _shard_of_chunk(chunk, num_ranks, rank)
            intervals += filled((offset + start, offset + stop))
            offset += chunk.size
        owned.append(tuple(intervals))
    return Layout(tuple(shape), num_ranks, dim, tuple(owned), chunks=tuple(chunks))


def of_packs(layout: Layout, elements: int) -> Layout:
    """The layout of a tensor whose every element stands for `elements` of another one along its last dim.

    Args:
        layout: of that other tensor. Where its last dim is sharded, `elements` divides every bound of the intervals.
    """
    return _with_last(layout, lambda size: size // elements)


def of_elements(layout: Layout, elements: int) -> Layout:
    """The inverse of `of_packs`: the layout of the other tensor."""
    return _with_last(layout, lambda size: size * elements)


def _with_last(layout: Layout, convert: Callable[[int], int]) -> Layout:
    """The layout with each size and bound of the last dim converted."""
    shape = (*layout.shape[:-1], convert(layout.shape[-1]))
    if layout.dim != len(layout.shape) - 1:
        return replace(layout, shape=shape)
    owned = tuple(tuple((convert(start), convert(stop)) for start, stop in part) for part in layout.owned)
    chunks = tuple(replace(chunk, size=convert(chunk.size)) for chunk in layout.chunks)
    return replace(layout, shape=shape, owned=owned, chunks=chunks)


def even_interval(size: int, num_ranks: int, rank: int) -> Interval:
    """(start, stop) of a rank's shard of `size` elements, split as `torch.chunk` does."""
    shard_size = -(-size // num_ranks)
    return min(rank * shard_size, size), min((rank + 1) * shard_size, size)


def balanced_interval(size: int, num_ranks: int, rank: int) -> Interval:
    """(start, stop) of a rank's shard of `size` elements, of which no two ranks differ by more than one."""
    return rank * size // num_ranks, (rank + 1) * size // num_ranks


def filled(interval: Interval) -> tuple[Interval, ...]:
    """The interval, or nothing if it is empty."""
    return (interval,) if interval[1] > interval[0] else ()


def local_units(units: int, num_ranks: int, replicable: bool) -> int | None:
    """The number of units of each rank, or None where units can be neither divided nor replicated."""
    if units % num_ranks == 0:
        return units // num_ranks
    return 1 if replicable and num_ranks % units == 0 else None


def _shard_of_chunk(chunk: Chunk, num_ranks: int, rank: int) -> Interval:
    if chunk.units is None:
        start, stop = even_interval(chunk.size // chunk.adjacent, num_ranks, rank)
        return start * chunk.adjacent, stop * chunk.adjacent
    per_rank = local_units(chunk.units, num_ranks, chunk.replicable)
    if per_rank is None:
        raise ShapeError(Problem("uneven-units", f"{chunk.units} {chunk.name or 'units'} over {num_ranks} ranks"))
    width = chunk.size // chunk.units
    first = rank * chunk.units // num_ranks
    return first * width, (first + per_rank) * width


def runs_of(numbers: Sequence[int]) -> tuple[Interval, ...]:
    """Ascending numbers as intervals of consecutive ones."""
    runs: list[Interval] = []
    for number in numbers:
        first = runs.pop()[0] if runs and runs[-1][1] == number else number
        runs.append((first, number + 1))
    return tuple(runs)


def count(runs: tuple[Interval, ...]) -> int:
    """The number of elements in runs [start, stop)."""
    return sum(stop - start for start, stop in runs)


def slice_runs(runs: tuple[Interval, ...], start: int, stop: int) -> tuple[Interval, ...]:
    """Elements `start` to `stop` of the concatenation of these runs."""
    sliced, before = [], 0
    for low, high in runs:
        first, last = max(low, low + start - before), min(high, low + stop - before)
        if first < last:
            sliced.append((first, last))
        before += high - low
    return tuple(sliced)
