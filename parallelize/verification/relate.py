"""How the ranks' tensors relate to the whole one: right in one of a few ways, or wrong in one of a few ways. Pure functions.

right   whole, shard(dim), slices(dim): blocks of the whole along one dim, which may be packed or held by several ranks
wrong   missing-reduction (their sum is the whole), doubled-reduction (each is a multiple of it, by the number of ranks or
        another whole number), wrong-scale (one constant ratio), permuted-chunks (its blocks in another order),
        wrong-shape, not-a-number, differs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch

T = torch.Tensor
Equal = Callable[[T, T], bool]
WRONG = {
    "missing-reduction": "the ranks' sum equals the unsharded value: it was never summed",
    "doubled-reduction": "it was summed more than once",
    "wrong-scale": "it is the right value times a constant",
    "permuted-chunks": "the right blocks stand in another order",
    "wrong-shape": "it has another shape",
    "not-a-number": "it holds values that are not finite",
    "differs": "",
}


@dataclass(frozen=True)
class Relation:
    """`kind` as above; `dim` of a shard; `ratio` of a wrong scale."""

    kind: str
    dim: int | None = None
    ratio: float = 1.0

    @property
    def right(self) -> bool:
        return self.kind in ("whole", "shard", "slices")

    def __str__(self) -> str:
        return f"{self.kind}({self.dim})" if self.dim is not None else self.kind


def error_of(got: T, want: T, floor: float = 0.0) -> float:
    """max |a - b| over max |b|, the latter floored; infinite where shapes or finiteness differ."""
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    difference = float((got.double() - want.double()).abs().max())
    error = difference / max(float(want.double().abs().max()), floor, 1e-300)
    return error if error == error else float("inf")


def relate(locals_: Sequence[T], whole: T, bound: float, floor: float = 0.0) -> Relation:
    """What the tensors of the ranks, in rank order, are to the unsharded one."""
    if any(not torch.isfinite(local).all() for local in locals_) and torch.isfinite(whole).all():
        return Relation("not-a-number")

    def equal(got: T, want: T) -> bool:
        return error_of(got, want, floor) <= bound

    if all(equal(local, whole) for local in locals_):
        return Relation("whole")
    if all(local.ndim == whole.ndim for local in locals_):
        for dim in range(whole.ndim):
            if _fits(locals_, whole, dim) and (found := _along(locals_, whole, dim, equal)):
                return found
    return _wrong(locals_, whole, bound, floor)


def _fits(locals_: Sequence[T], whole: T, dim: int) -> bool:
    """Whether the tensors can be cut from the whole along `dim` alone."""
    rest = [size for place, size in enumerate(whole.shape) if place != dim]
    return all([s for place, s in enumerate(local.shape) if place != dim] == rest for local in locals_)


def _along(locals_: Sequence[T], whole: T, dim: int, equal: Equal) -> Relation | None:
    size = whole.shape[dim]
    if max(local.shape[dim] for local in locals_) >= size:
        return None
    joined = torch.cat(list(locals_), dim)
    if joined.shape[dim] >= size and equal(joined.narrow(dim, 0, size), whole):
        return Relation("shard", dim)
    for width in dict.fromkeys((_width(locals_, size, dim), 1)):
        places = _blocks(locals_, whole, dim, width, equal)
        if places is None:
            continue
        found = [[place for place in mine if place is not None] for mine in places]
        padding = sum(map(len, places)) - sum(map(len, found))
        if padding > max(0, joined.shape[dim] - size) // width:
            continue  # more than what fills up uneven shards
        covered = {place for mine in found for place in mine} >= set(range(size // width))
        ordered = all(mine == sorted(mine) for mine in found)
        return Relation("slices" if covered and ordered else "permuted-chunks", dim)
    return None


def _width(locals_: Sequence[T], size: int, dim: int) -> int:
    """The widest blocks of which the whole and every part are made."""
    width = size
    for local in locals_:
        width = gcd(width, local.shape[dim])
    return width


def _blocks(locals_: Sequence[T], whole: T, dim: int, width: int, equal: Equal) -> list[list[int | None]] | None:
    """For each rank the whole's blocks that it holds, by number; None for a block that is none of the whole's.

    None altogether where blocks are equal, so that their order tells nothing.
    """
    known = {_print(block): place for place, block in enumerate(whole.split(width, dim))}
    if len(known) < whole.shape[dim] // width:
        return None
    return [[_find(block, known, whole, width, dim, equal) for block in local.split(width, dim)] for local in locals_]


def _print(block: T) -> float:
    """A number that tells blocks apart: their product with fixed random weights."""
    flat = block.double().reshape(-1)
    weights = torch.rand(flat.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return float(flat.cpu() @ weights)


def _find(block: T, known: dict[float, int], whole: T, width: int, dim: int, equal: Equal) -> int | None:
    mark = _print(block)
    near = min(known, key=lambda other: abs(other - mark))
    place = known[near]
    return place if equal(block, whole.narrow(dim, place * width, width)) else None


def _wrong(locals_: Sequence[T], whole: T, bound: float, floor: float) -> Relation:
    """The kind of mistake, where it can be told."""
    if any(local.shape != whole.shape for local in locals_):
        return Relation("wrong-shape")
    same = all(error_of(local, locals_[0], floor) <= bound for local in locals_)
    if not same and error_of(torch.stack([local.double() for local in locals_]).sum(0), whole, floor) <= bound:
        return Relation("missing-reduction")
    ratios = [_ratio(local, whole, bound, floor) for local in locals_]
    ratio = ratios[0]
    if ratio is not None and all(
        other is not None and abs(other - ratio) <= bound * abs(ratio) * 10 for other in ratios
    ):
        doubled = ratio > 1.5 and abs(ratio - round(ratio)) <= 10 * bound * ratio
        return Relation("doubled-reduction" if doubled else "wrong-scale", ratio=ratio)
    if any(_is_permuted(local, whole, bound) for local in locals_):
        return Relation("permuted-chunks")
    return Relation("differs")


def _ratio(local: T, whole: T, bound: float, floor: float) -> float | None:
    """The constant by which they differ, or None."""
    a, b = local.double().reshape(-1), whole.double().reshape(-1)
    square = float(b @ b)
    if not square:
        return None
    ratio = float(a @ b) / square
    return ratio if abs(ratio) > 1e-6 and error_of(a, b * ratio, floor * abs(ratio)) <= bound else None


def _is_permuted(local: T, whole: T, bound: float) -> bool:
    """The same numbers, in another order along one dim."""
    for dim in range(whole.ndim):
        if whole.shape[dim] < 2:
            continue
        marks = [
            torch.tensor([_print(part) for part in tensor.split(1, dim)]).sort().values for tensor in (local, whole)
        ]
        if error_of(marks[0], marks[1]) <= bound * 10:
            return True
    return False
