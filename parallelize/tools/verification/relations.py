"""How the ranks' tensors relate to the full one: correct in one of three ways, or wrong in one of several. Pure
functions.

correct full, shard(dim), slices(dim): blocks of the full tensor along one dim, which may be packed or stored on several
ranks
wrong    missing-reduction (the ranks' sum is the full tensor), doubled-reduction (each is a multiple of it, by the number of
         ranks or another integer), wrong-scale (one constant ratio), permuted-chunks (its blocks in another order),
         wrong-shape, not-a-number, differs
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch

T = torch.Tensor
WRONG = {
    "missing-reduction": "the ranks' sum equals the unsharded value: it was never summed",
    "doubled-reduction": "it was summed more than once",
    "wrong-scale": "it is the right value times a constant",
    "permuted-chunks": "the right blocks are in another order",
    "wrong-shape": "it has another shape",
    "not-a-number": "it contains values that are not finite",
    "differs": "",
}


@dataclass(frozen=True)
class Relation:
    """`kind` as listed above, `dim` of a shard, `ratio` of a wrong scale."""

    kind: str
    dim: int | None = None
    ratio: float = 1.0

    @property
    def right(self) -> bool:
        return self.kind in ("full", "shard", "slices")

    def __str__(self) -> str:
        return f"{self.kind}({self.dim})" if self.dim is not None else self.kind


def error_of(actual: T, expected: T, floor: float = 0.0) -> float:
    """max |a - b| over max |b|, where the latter is at least `floor`. Infinite where shapes or finiteness differ."""
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    difference = float((actual.double() - expected.double()).abs().max())
    error = difference / max(float(expected.double().abs().max()), floor, 1e-300)
    return error if error == error else float("inf")


@dataclass(frozen=True)
class _Tolerance:
    """Tensors are equal when their error, with this floor, is within the bound."""

    bound: float
    floor: float

    def error(self, actual: T, expected: T) -> float:
        return error_of(actual, expected, self.floor)

    def equal(self, actual: T, expected: T) -> bool:
        return self.error(actual, expected) <= self.bound


def relate(locals_: Sequence[T], full: T, bound: float, floor: float = 0.0) -> Relation:
    """The relation of the ranks' tensors, in rank order, to the full tensor."""
    if any(not torch.isfinite(local).all() for local in locals_) and torch.isfinite(full).all():
        return Relation("not-a-number")
    tolerance = _Tolerance(bound, floor)
    if all(tolerance.equal(local, full) for local in locals_):
        return Relation("full")
    if all(local.ndim == full.ndim for local in locals_):
        for dim in range(full.ndim):
            if _fits(locals_, full, dim) and (relation := _along(locals_, full, dim, tolerance)):
                return relation
    return _wrong(locals_, full, tolerance)


def _fits(locals_: Sequence[T], full: T, dim: int) -> bool:
    """Whether shapes differ in `dim` alone."""

    def other_sizes(tensor: T) -> tuple[int, ...]:
        return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])

    return all(other_sizes(local) == other_sizes(full) for local in locals_)


def _along(locals_: Sequence[T], full: T, dim: int, tolerance: _Tolerance) -> Relation | None:
    """The relation if the ranks' tensors consist of blocks of the full one along `dim`."""
    size = full.shape[dim]
    if max(local.shape[dim] for local in locals_) >= size:
        return None
    joined = torch.cat(list(locals_), dim)
    if joined.shape[dim] >= size and tolerance.equal(joined.narrow(dim, 0, size), full):
        return Relation("shard", dim)
    for width in dict.fromkeys((_block_width(locals_, size, dim), 1)):
        indices = _block_indices(locals_, _Blocks(full, dim, width, tolerance))
        if indices is None:
            continue
        known = [[index for index in of_rank if index is not None] for of_rank in indices]
        padding = sum(map(len, indices)) - sum(map(len, known))
        if padding > max(0, joined.shape[dim] - size) // width:
            continue  # more than the padding of uneven shards
        complete = {index for of_rank in known for index in of_rank} >= set(range(size // width))
        ordered = all(of_rank == sorted(of_rank) for of_rank in known)
        return Relation("slices" if complete and ordered else "permuted-chunks", dim)
    return None


def _block_width(locals_: Sequence[T], size: int, dim: int) -> int:
    """The widest blocks into which the full tensor and every local one can be split."""
    width = size
    for local in locals_:
        width = gcd(width, local.shape[dim])
    return width


class _Blocks:
    """Blocks of the full tensor, which are found by value."""

    def __init__(self, full: T, dim: int, width: int, tolerance: _Tolerance):
        self.full, self.dim, self.width, self.tolerance = full, dim, width, tolerance
        self.index_by_fingerprint = {_fingerprint(b): index for index, b in enumerate(full.split(width, dim))}
        self.are_distinct = len(self.index_by_fingerprint) >= full.shape[dim] // width

    def index_of(self, block: T) -> int | None:
        fingerprint = _fingerprint(block)
        nearest = min(self.index_by_fingerprint, key=lambda other: abs(other - fingerprint))
        index = self.index_by_fingerprint[nearest]
        expected = self.full.narrow(self.dim, index * self.width, self.width)
        return index if self.tolerance.equal(block, expected) else None


def _block_indices(locals_: Sequence[T], blocks: _Blocks) -> list[list[int | None]] | None:
    """For each rank the indices of its blocks in the full tensor; None for a block that the full tensor does not have.

    None instead of a list where blocks of the full tensor are equal, so that they have no order.
    """
    if not blocks.are_distinct:
        return None
    return [[blocks.index_of(block) for block in local.split(blocks.width, blocks.dim)] for local in locals_]


def _fingerprint(block: T) -> float:
    """A number that distinguishes blocks: the dot product with fixed random weights."""
    flat = block.double().reshape(-1)
    weights = torch.rand(flat.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return float(flat.cpu() @ weights)


def _wrong(locals_: Sequence[T], full: T, tolerance: _Tolerance) -> Relation:
    """The kind of mistake, "differs" where it is unknown."""
    if any(local.shape != full.shape for local in locals_):
        return Relation("wrong-shape")
    replicated = all(tolerance.equal(local, locals_[0]) for local in locals_)
    if not replicated and tolerance.equal(torch.stack([local.double() for local in locals_]).sum(0), full):
        return Relation("missing-reduction")
    ratio = _common_ratio([_ratio(local, full, tolerance) for local in locals_], tolerance.bound)
    if ratio is not None:
        doubled = ratio > 1.5 and abs(ratio - round(ratio)) <= 10 * tolerance.bound * ratio
        return Relation("doubled-reduction" if doubled else "wrong-scale", ratio=ratio)
    if any(_is_permuted(local, full, tolerance.bound) for local in locals_):
        return Relation("permuted-chunks")
    return Relation("differs")


def _common_ratio(ratios: Sequence[float | None], bound: float) -> float | None:
    first = ratios[0]
    if first is None:
        return None
    same = all(ratio is not None and abs(ratio - first) <= bound * abs(first) * 10 for ratio in ratios)
    return first if same else None


def _ratio(local: T, full: T, tolerance: _Tolerance) -> float | None:
    """The constant ratio of two tensors, or None."""
    a, b = local.double().reshape(-1), full.double().reshape(-1)
    square = float(b @ b)
    if not square:
        return None
    ratio = float(a @ b) / square
    is_constant = abs(ratio) > 1e-6 and error_of(a, b * ratio, tolerance.floor * abs(ratio)) <= tolerance.bound
    return ratio if is_constant else None


def _is_permuted(local: T, full: T, bound: float) -> bool:
    """Whether the slices along some dim are the same, in another order."""
    for dim in range(full.ndim):
        if full.shape[dim] < 2:
            continue
        fingerprints = [
            torch.tensor([_fingerprint(part) for part in tensor.split(1, dim)]).sort().values
            for tensor in (local, full)
        ]
        if error_of(fingerprints[0], fingerprints[1]) <= bound * 10:
            return True
    return False
