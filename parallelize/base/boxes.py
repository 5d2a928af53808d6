"""Boxes of tensors: intersections, offsets, and the contiguous runs of bytes of a box in a file.

Does not import torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dim of a full tensor. A scalar's box is ()."""


@dataclass(frozen=True)
class Part:
    """A box of a target tensor, and the box of a source tensor that has the same elements.

    Attributes:
        source: name of the source tensor.
        target: the box of the target tensor.
        source_start: start of the box in the source, along each of its dims.
        dims: for each dim of the source, the dim of the target that it corresponds to. None: it corresponds to no dim
            of the target, and the box has extent 1 along it. Dims of the target that are not listed have extent 1 in
            `target`.
    """

    source: str
    target: Box
    source_start: tuple[int, ...]
    dims: tuple[int | None, ...]

    def source_box(self, within: Box) -> Box:
        """The box of the source for a box of the target that is inside `target`."""
        intervals = []
        for start, dim in zip(self.source_start, self.dims, strict=True):
            if dim is None:
                intervals.append((start, start + 1))
                continue
            offset = start - self.target[dim][0]
            intervals.append((within[dim][0] + offset, within[dim][1] + offset))
        return tuple(intervals)


def full_part(source: str, shape: Sequence[int]) -> Part:
    """The part for a target that equals the source."""
    return Part(source, *_full(tuple(shape)))


@lru_cache(maxsize=4096)
def _full(shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...], tuple[int, ...]]:
    """What the parts of all tensors of a shape share."""
    return full_box(shape), (0,) * len(shape), tuple(range(len(shape)))


def full_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_of(slices: Sequence[slice]) -> Box:
    return tuple((part.start, part.stop) for part in slices)


def slices_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


@lru_cache(maxsize=4096)
def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes of one tensor; None if it is empty."""
    box = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return box if all(stop > start for start, stop in box) else None


def relative_to(box: Box, origin: Sequence[int]) -> Box:
    """The same box, with indices counted from `origin`."""
    return tuple((start - offset, stop - offset) for (start, stop), offset in zip(box, origin, strict=True))


def starts(box: Box) -> tuple[int, ...]:
    return tuple(start for start, _ in box)


def contains(shape: Sequence[int], box: Box) -> bool:
    return len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes of one tensor that share elements; None if no two do.

    Boxes are compared with those that begin before they end along one dim: along the one with the most intervals, so
    that few are.
    """
    dims = len(boxes[0]) if boxes else 0
    if not dims:  # scalars: all boxes are the same
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    dim = max(range(dims), key=lambda dim: len({box[dim] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box[dim])
    for index, first in enumerate(ordered):
        for second in itertools.islice(ordered, index + 1, None):
            if second[dim][0] >= first[dim][1]:
                break
            if intersection(first, second) is not None:
                return first, second
    return None


@dataclass(frozen=True)
class Runs:
    """A box of a tensor in row-major order, as runs of contiguous elements that all have the same length.

    Attributes:
        shape: the shape of the tensor.
        box: a box of the tensor.
        length: number of elements of a run.
        count: number of runs.
    """

    shape: tuple[int, ...]
    box: Box
    length: int
    count: int

    @property
    def is_contiguous(self) -> bool:
        return self.count <= 1

    def offsets(self) -> Iterator[int]:
        """The index of the first element of each run, in the flattened tensor."""
        dims = len(self.shape) - self._inner
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        base = sum(self.box[dim][0] * strides[dim] for dim in range(len(self.shape)))
        outer = [(shape_of(self.box)[dim], strides[dim]) for dim in range(dims)]
        yield from _walk(base, outer)

    @property
    def _inner(self) -> int:
        """The number of trailing dims that one run covers."""
        inner = 0
        for size, (start, stop) in zip(reversed(self.shape), reversed(self.box), strict=True):
            inner += 1
            if stop - start != size:
                break
        return inner

    @property
    def span(self) -> tuple[int, int]:
        """The interval [first, last + 1) of flattened elements that contains the box."""
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        first = sum(start * stride for (start, _), stride in zip(self.box, strides, strict=True))
        last = sum((stop - 1) * stride for (_, stop), stride in zip(self.box, strides, strict=True))
        return (first, last + 1) if self.count and self.length else (first, first)


def _walk(base: int, outer: list[tuple[int, int]]) -> Iterator[int]:
    if not outer:
        yield base
        return
    (size, stride), *rest = outer
    for index in range(size):
        yield from _walk(base + index * stride, rest)


def runs(shape: Sequence[int], box: Box) -> Runs:
    """The runs of a box. Trailing dims that the box covers fully belong to one run."""
    sizes, length, dim = shape_of(box), 1, len(shape)
    while dim > 0:
        dim -= 1
        length *= sizes[dim]
        if sizes[dim] != shape[dim]:
            break
    return Runs(tuple(shape), box, length, math.prod(sizes[:dim]))
