"""Boxes of tensors: what they have in common, and which runs of bytes they are in a file.

Torch-free: pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dim of a full tensor. A scalar's box is ()."""


@dataclass(frozen=True)
class Part:
    """A box of a target tensor, and where its elements stand in a tensor of a checkpoint.

    `dims[i]` is the target dim that dim i of the source runs along; target dims that are absent from it have extent 1 in
    `target`. None: along none, so that the box has extent 1 there, at `source_start[i]`. `source_start[i]` is where the
    box begins along dim i of the source.
    """

    source: str
    target: Box
    source_start: tuple[int, ...]
    dims: tuple[int | None, ...]

    def source_box(self, within: Box) -> Box:
        """The source's box for a box of the target that lies inside `target`."""
        found = []
        for start, dim in zip(self.source_start, self.dims, strict=True):
            if dim is None:
                found.append((start, start + 1))
                continue
            offset = start - self.target[dim][0]
            found.append((within[dim][0] + offset, within[dim][1] + offset))
        return tuple(found)


def whole_part(source: str, shape: Sequence[int]) -> Part:
    """The source is the target."""
    return Part(source, whole(shape), (0,) * len(shape), tuple(range(len(shape))))


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_of(slices: Sequence[slice]) -> Box:
    return tuple((part.start, part.stop) for part in slices)


def slices_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def common(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share; None where that is nothing."""
    found = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return found if all(stop > start for start, stop in found) else None


def moved(box: Box, origin: Sequence[int]) -> Box:
    """The same elements, counted from `origin`."""
    return tuple((start - at, stop - at) for (start, stop), at in zip(box, origin, strict=True))


def starts(box: Box) -> tuple[int, ...]:
    return tuple(start for start, _ in box)


def contains(shape: Sequence[int], box: Box) -> bool:
    return len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes of one tensor that share elements, if any do."""
    ordered = sorted(boxes)
    for place, first in enumerate(ordered):
        for second in ordered[place + 1 :]:
            if second and first and second[0][0] >= first[0][1]:
                break
            if common(first, second) is not None:
                return first, second
    return None


@dataclass(frozen=True)
class Runs:
    """A box of a tensor in row-major order, as equal runs of neighbouring elements.

    Attributes:
        shape: of the tensor. length: elements in a run. count: of runs.
    """

    shape: tuple[int, ...]
    box: Box
    length: int
    count: int

    @property
    def is_one(self) -> bool:
        return self.count <= 1

    def offsets(self) -> Iterator[int]:
        """Where each run begins."""
        dims = len(self.shape) - self._inner
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        base = sum(self.box[dim][0] * strides[dim] for dim in range(len(self.shape)))
        outer = [(shape_of(self.box)[dim], strides[dim]) for dim in range(dims)]
        yield from _walk(base, outer)

    @property
    def _inner(self) -> int:
        """Dims that one run covers, counted from the last."""
        inner = 0
        for size, (start, stop) in zip(reversed(self.shape), reversed(self.box), strict=True):
            inner += 1
            if stop - start != size:
                break
        return inner

    @property
    def span(self) -> tuple[int, int]:
        """(first, one past the last) element of the tensor that the box touches."""
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
    """The runs of a box: whole inner dims belong to one run."""
    sizes, length, dim = shape_of(box), 1, len(shape)
    while dim > 0:
        dim -= 1
        length *= sizes[dim]
        if sizes[dim] != shape[dim]:
            break
    return Runs(tuple(shape), box, length, math.prod(sizes[:dim]))
