"""The factors that may be sharded, and which of them are: no two that have a linear in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from parallelize.plan.dims.factors import Factor


@dataclass(frozen=True)
class Place:
    """Where a factor occurs in a parameter.

    Attributes:
        parameter: one of its names. dim: of the parameter.
        parts: the factors of the dim, of each part by itself where the forward splits it into parts (query, key,
            value).
    """

    parameter: str
    dim: int
    parts: tuple[tuple[Factor, ...], ...]


@dataclass(eq=False)
class ShardableFactor:
    """A factor that may be sharded, with all places in which parameters have it.

    Attributes:
        columns, rows: the linears that have it as an output dim, and those that sum over it.
        block: the module whose input must be converted once, because full activations with a gradient meet the factor
            inside it, such as the latents of MLA; empty: there is none.
        joined: the factors that are sharded only together with it, because each leads a part of one dim: the heads and
            the features of an MLP, whose concatenation a row linear reads.
    """

    factor: Factor
    places: list[Place]
    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    block: str = ""
    joined: set[Factor] = field(default_factory=set)

    @property
    def linears(self) -> set[str]:
        return {*self.columns, *self.rows}


Group = list[ShardableFactor]
"""One factor, or several that are joined."""

Elements = Callable[[Group], int]
"""The number of elements of the parameters that have one of these factors."""


def linears_of(group: Iterable[ShardableFactor]) -> set[str]:
    """All linears of these factors."""
    return {name for candidate in group for name in candidate.linears}


def join(usable: dict[Factor, ShardableFactor]) -> Group:
    """Complete the sets of joined factors, and remove those that are joined with one that is not usable.

    Returns: what was removed.
    """
    for candidate in usable.values():
        pending = list(candidate.joined)
        while pending:
            other = usable.get(pending.pop())
            new = other.joined - candidate.joined - {candidate.factor} if other is not None else set()
            candidate.joined |= new
            pending += new
    removed = [candidate for candidate in usable.values() if candidate.joined - usable.keys()]
    for candidate in removed:
        del usable[candidate.factor]
    return removed


def joined_groups(candidates: Group, elements: Elements) -> list[Group]:
    """The candidates, those together that are joined; the largest groups first."""
    groups: dict[frozenset[Factor], Group] = {}
    for candidate in candidates:
        groups.setdefault(frozenset({candidate.factor, *candidate.joined}), []).append(candidate)
    return sorted(groups.values(), key=lambda group: -elements(group))


def disjoint(groups: list[Group], elements: Elements) -> list[Group]:
    """Groups of which no two have a linear in common, the largest first.

    A group waits where others that it excludes are larger together: the width of a text that the keys and values of
    all layers read excludes the heads of each layer.

    Args:
        groups: the largest first.
    """
    used: set[str] = set()
    chosen: list[Group] = []
    waiting: list[Group] = []
    for index, group in enumerate(groups):
        if not linears_of(group) & used:
            rivals = _rivals(group, groups[index + 1 :], used)
            outdone = sum(map(elements, rivals)) > elements(group)
            (waiting if outdone else chosen).append(group)
            used |= set() if outdone else linears_of(group)
    for group in waiting:
        if not linears_of(group) & used:
            chosen.append(group)
            used |= linears_of(group)
    return chosen


def _rivals(group: Group, smaller: list[Group], used: set[str]) -> list[Group]:
    """Smaller groups that this one excludes, and that do not exclude each other."""
    linears, taken = linears_of(group), set(used)
    rivals = []
    for other in smaller:
        if linears_of(other) & linears and not linears_of(other) & taken:
            rivals.append(other)
            taken |= linears_of(other)
    return rivals
