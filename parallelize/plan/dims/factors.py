"""Dims of tensors as products of factors, which operations tie together.

A dim of size 48 may be 8 heads times a width of 6. `Factor` is one of these: all dims in which it occurs are the same
axis of the computation. Operations make factors equal (`unify`: an addition ties the dims of its operands), or divide
them (`regroup`: a view of 48 as [8, 6]). A dim of size 1 has no factors. The first factor of a dim changes slowest.

Source: the idea of named dims that are propagated through operations, as in GSPMD (Xu et al., arXiv:2105.04663) and
    PartIR
(Alabed et al., arXiv:2401.11202); views divide factors as in einops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod


@dataclass(eq=False)
class Factor:
    """A factor of the size of dims.

    Attributes:
        size: at least 2.
        same: the factor that it was found to be the same as; None: it stands for itself.
        parts: the factors that it was divided into, the slowest first; empty: none.
    """

    size: int
    same: Factor | None = None
    parts: tuple[Factor, ...] = field(default=())

    def __repr__(self) -> str:
        return f"{self.size}#{id(self) % 9973}"


Dim = list[Factor]
"""The factors of one dim, the slowest first."""


def new_dim(size: int) -> Dim:
    """A dim about which nothing is known but its size."""
    return [Factor(size)] if size > 1 else []


def leaves(dim: Iterable[Factor]) -> Dim:
    """The undivided factors of a dim, each replaced by the representative of its equals."""
    result: Dim = []
    for factor in dim:
        while factor.same is not None:
            factor = factor.same
        result += leaves(factor.parts) if factor.parts else [factor]
    return result


def size_of(dim: Iterable[Factor]) -> int:
    return prod(factor.size for factor in dim)


def divide(factor: Factor, *sizes: int) -> tuple[Factor, ...]:
    """Divide a leaf into factors of these sizes, the slowest first."""
    assert not factor.parts and factor.same is None and prod(sizes) == factor.size
    factor.parts = tuple(Factor(size) for size in sizes)
    return factor.parts


def unify(first: Dim, second: Dim) -> bool:
    """Make two dims of one size the same axis. Returns whether their factors fit together."""
    a, b = leaves(first), leaves(second)
    while a and b:
        left, right = a[0], b[0]
        if left is right:
            a, b = a[1:], b[1:]
        elif left.size == right.size:
            right.same = left
            a, b = leaves(a[1:]), leaves(b[1:])
        elif left.size > right.size and left.size % right.size == 0:
            divide(left, right.size, left.size // right.size)
            a, b = leaves(a), leaves(b)
        elif right.size > left.size and right.size % left.size == 0:
            divide(right, left.size, right.size // left.size)
            a, b = leaves(a), leaves(b)
        else:
            return False
    return not a and not b


def regroup(factors: Dim, sizes: list[int]) -> list[Dim] | None:
    """Dims of these sizes from the factors of a tensor, in order, as a view makes them; None where they do not fit."""
    remaining, dims = leaves(factors), []
    for size in sizes:
        dim: Dim = []
        missing = size
        while missing > 1:
            if not remaining:
                return None
            first = remaining[0]
            if missing % first.size == 0:
                dim.append(first)
                missing //= first.size
                remaining = remaining[1:]
            elif first.size % missing == 0:
                divide(first, missing, first.size // missing)
                remaining = leaves(remaining)
            else:
                return None
        dims.append(dim)
    return None if remaining else dims
