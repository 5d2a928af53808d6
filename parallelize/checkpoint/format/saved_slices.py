"""The slices in which a tensor is saved: each a box, and the file and entry that have it.

Many ranks cut a tensor at the same places along each dim. Such slices are a `Grid`: the manifest has the places and the
ranks, not the boxes, and a slice is made when it is asked for. A manifest of 2,048 ranks stays as small as one of 16.
Does not import torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Any, overload

from parallelize.base.boxes import Box, intersection

FEW = 16
"""Up to so many slices stand in a manifest one by one."""
Cuts = int | tuple[int, ...]
"""Along a dim: the length of every part but the last, or (0, ends of the parts)."""


@dataclass(frozen=True)
class SavedSlice:
    """A box of a tensor, and the file and entry in which it is saved."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class Grid(Sequence[SavedSlice]):
    """Slices that meet at the same places along each dim, in row-major order.

    The n-th slice of one file has the key `key@n`, its first one `key`.

    Attributes:
        shape: of the tensor. cuts: of each dim. files: of each slice; tensors of the same ranks share the tuple.
    """

    key: str
    shape: tuple[int, ...]
    cuts: tuple[Cuts, ...]
    files: tuple[str, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Parts along each dim."""
        return tuple(
            -(-size // cuts) if isinstance(cuts, int) else len(cuts) - 1
            for size, cuts in zip(self.shape, self.cuts, strict=True)
        )

    @property
    def is_whole(self) -> bool:
        """Whether each element is in one slice."""
        return math.prod(self.counts) == len(self.files) and all(map(_is_cut, self.shape, self.cuts))

    @cached_property
    def _numbers(self) -> tuple[int, ...] | None:
        """Of each slice, how many of its file come before it; None where no file has two."""
        if len(set(self.files)) == len(self.files):
            return None
        seen: dict[str, int] = {}
        numbers = []
        for file in self.files:
            numbers.append(seen.get(file, 0))
            seen[file] = numbers[-1] + 1
        return tuple(numbers)

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, index: int) -> SavedSlice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SavedSlice, ...]: ...
    def __getitem__(self, index: int | slice) -> SavedSlice | tuple[SavedSlice, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        index = range(len(self))[index]
        places, rest = [], index
        for count in reversed(self.counts):
            rest, place = divmod(rest, count)
            places.append(place)
        return self._slice(index, tuple(reversed(places)))

    def _slice(self, index: int, places: tuple[int, ...]) -> SavedSlice:
        number = self._numbers[index] if self._numbers is not None else 0
        return SavedSlice(self.files[index], key_of(self.key, number), tuple(map(_part, self.shape, self.cuts, places)))

    def overlapping(self, box: Box) -> Iterator[SavedSlice]:
        """The slices that have elements of a box."""
        if any(stop <= start for start, stop in box):
            return
        for places in product(*map(_parts_of, self.cuts, self.counts, box)):
            index = 0
            for count, place in zip(self.counts, places, strict=True):
                index = index * count + place
            yield self._slice(index, places)


def _is_cut(size: int, cuts: Cuts) -> bool:
    if isinstance(cuts, int):
        return 0 < cuts <= size
    return cuts[0] == 0 and cuts[-1] == size and all(start < stop for start, stop in pairwise(cuts))


def _part(size: int, cuts: Cuts, place: int) -> tuple[int, int]:
    if isinstance(cuts, int):
        return place * cuts, min(size, (place + 1) * cuts)
    return cuts[place], cuts[place + 1]


def _parts_of(cuts: Cuts, count: int, interval: tuple[int, int]) -> range:
    """The parts along a dim that have elements of an interval, which is not empty."""
    start, stop = interval
    if isinstance(cuts, int):
        return range(start // cuts, min(count, (stop - 1) // cuts + 1))
    return range(bisect_right(cuts, start) - 1, min(count, bisect_left(cuts, stop)))


def key_of(name: str, number: int) -> str:
    """The entry of a file for its slice of this number."""
    return name if number == 0 else f"{name}@{number}"


def overlapping_slices(slices: Sequence[SavedSlice], box: Box) -> Iterator[SavedSlice]:
    """Those that have elements of a box."""
    if isinstance(slices, Grid):
        return slices.overlapping(box)
    return (part for part in slices if intersection(box, part.box) is not None)


def files_of(slices: Sequence[SavedSlice]) -> frozenset[str]:
    return frozenset(slices.files if isinstance(slices, Grid) else (part.file for part in slices))


def arranged(shape: tuple[int, ...], rows: Sequence[tuple[str, str, Box]]) -> Sequence[SavedSlice]:
    """(file, key, box) of slices: as a grid, where they are many and make one."""
    return (_grid(shape, rows) if len(rows) > FEW else None) or tuple(SavedSlice(*row) for row in rows)


def _grid(shape: tuple[int, ...], rows: Sequence[tuple[str, str, Box]]) -> Grid | None:
    intervals = [sorted(set(dim)) for dim in zip(*(box for _, _, box in rows), strict=True)]
    if math.prod(map(len, intervals)) != len(rows) or len(intervals) != len(shape):
        return None
    by_box = {box: (file, key) for file, key, box in rows}
    cuts = tuple(map(_cuts, shape, intervals))
    if len(by_box) < len(rows) or None in cuts:
        return None
    ordered = [by_box[box] for box in product(*intervals)]
    grid = Grid(ordered[0][1], shape, cuts, tuple(file for file, _ in ordered))  # type: ignore[arg-type]
    numbers = grid._numbers or (0,) * len(grid)
    has_keys = all(key == key_of(grid.key, n) for (_, key), n in zip(ordered, numbers, strict=True))
    return grid if has_keys and grid.is_whole else None


def _cuts(size: int, intervals: list[tuple[int, int]]) -> Cuts | None:
    """None where the intervals, in order, leave gaps or overlap."""
    step = intervals[0][1] - intervals[0][0]
    if 0 < step <= size and intervals == [(start, min(size, start + step)) for start in range(0, size, step)]:
        return step
    cuts = (0, *(stop for _, stop in intervals))
    return cuts if intervals == list(pairwise(cuts)) and _is_cut(size, cuts) else None


# -- as JSON -----------------------------------------------------------------------------------------------------------


class SlicesWriter:
    """Slices as a manifest has them.

    Attributes:
        groups: the numbers of the files of grids, each list once.
    """

    def __init__(self, files: Sequence[str]):
        self.numbers = {name: number for number, name in enumerate(files)}
        self.groups: list[list[int]] = []
        self._group_of: dict[tuple[str, ...], int] = {}

    def rows(self, slices: Sequence[SavedSlice]) -> Any:
        """[number of a file, key, interval, ...] of each slice; of a grid {"group", "key", "cuts"}."""
        if not isinstance(slices, Grid):
            # tuples: not followed by gc
            return [(self.numbers[part.file], part.key, *part.box) for part in slices]
        if slices.files not in self._group_of:
            self._group_of[slices.files] = len(self.groups)
            self.groups.append([self.numbers[file] for file in slices.files])
        return {"group": self._group_of[slices.files], "key": slices.key, "cuts": slices.cuts}


class SlicesReader:
    """Slices from what a manifest has.

    Args:
        files: their names. groups: numbers of files.

    Raises: ValueError, TypeError, KeyError, IndexError for invalid content; `is_whole` of a grid is not checked.
    """

    def __init__(self, files: Sequence[str], groups: Sequence[Sequence[int]]):
        self.files = files
        self.groups = [tuple(files[size(number)] for number in group) for group in groups]

    def slices(self, shape: tuple[int, ...], rows: Any) -> Sequence[SavedSlice]:
        if not isinstance(rows, dict):
            return tuple(
                SavedSlice(self.files[size(number)], str(key), tuple((size(a), size(b)) for a, b in box))
                for number, key, *box in rows
            )
        cuts = tuple(size(dim) if isinstance(dim, int) else tuple(map(size, dim)) for dim in rows["cuts"])
        if len(cuts) != len(shape) or not all(dim if isinstance(dim, int) else len(dim) > 1 for dim in cuts):
            raise ValueError(f"cuts {str(cuts)[:60]} of {list(shape)}")
        return Grid(str(rows["key"]), shape, cuts, self.groups[size(rows["group"])])


def size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:40]} is not a size")
    return value
