"""Rows that meet in one loop: a cover in which every two of them meet, each cell on a kind and an axis that are drawn.

Rows that are several in one already, such as an optimizer that is resumed, meet none.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations

from tests.matrix import verdicts
from tests.matrix.axes import AXES
from tests.matrix.cells import REFUSED, Verdict, cells_of, run_cell
from tests.matrix.drawing import number_of
from tests.matrix.faults import RESULTS
from tests.matrix.feature import Feature, load_features, together
from tests.matrix.journal import JOURNAL as OF_THE_TABLE
from tests.matrix.kinds import KINDS
from tests.matrix.pools import pool_of
from tests.matrix.verdicts import Cell

JOURNAL = OF_THE_TABLE.with_name("pairs.jsonl")
SEED = 7
_ON_PROCESSES = 10  # one of so many cells of two or four ranks has ranks that are processes
Place = tuple[str, str]


@cache
def rows() -> dict[str, Feature]:
    """The rows that meet others."""
    return {name: row for name, row in load_features().items() if row.loop is not None and row.meets}


@cache
def places_of(name: str) -> frozenset[Place]:
    """(kind, axis) of a row."""
    return frozenset((kind, axis) for kind in KINDS for axis in cells_of(rows()[name], kind))


@cache
def pairs() -> tuple[tuple[str, str], ...]:
    """Every two rows that meet somewhere: those that seeded faults were found by first, in an order that is drawn."""
    found = [pair for pair in combinations(sorted(rows()), 2) if meets(*pair)]
    return tuple(sorted(found, key=lambda pair: (-sum(name in finders() for name in pair), number_of(*pair))))


@cache
def meets(first: str, second: str) -> bool:
    """Whether two rows do what one loop can, for a kind on an axis."""
    return bool(places_of(first) & places_of(second)) and together((rows()[first], rows()[second])) is not None


@cache
def finders() -> frozenset[str]:
    """Rows that found a seeded fault, and that are sometimes refused: where a limit is near, others are."""
    finding = {found["cell"].partition(" ")[0] for found in json.loads(RESULTS.read_text())}
    return frozenset(finding | {name for name, row in rows().items() if row.refused}) & rows().keys()


def cover(size: int = 2) -> Iterator[Cell]:
    """Cells of so many rows, or fewer, in which all pairs meet: the next pair that has not, and with it the rows that
    meet most others for the first time."""
    left: dict[str, set[str]] = {name: set() for name in rows()}
    for first, second in pairs():
        left[first].add(second)
    draw, used = random.Random(SEED), Counter()
    for first, second in pairs():
        if second in left[first]:
            names = _joined((first, second), size, left, draw)
            for one, other in combinations(names, 2):
                left[one].discard(other)
            yield ("+".join(names), *_place(names, draw, used))


def drawn(size: int, number: int, seed: int = SEED) -> list[Cell]:
    """So many cells of this many rows, drawn by a seed: the longer list begins with the shorter one."""
    draw, used, cells = random.Random(seed), Counter(), []
    left = {name: set(partners(name)) for name in rows()}
    while len(cells) < number:
        names = _joined(draw.choice(pairs()), size, left, draw)
        if len(names) == size:
            cells.append(("+".join(names), *_place(names, draw, used)))
    return cells


@cache
def partners(name: str) -> frozenset[str]:
    return frozenset(other for other in rows() if other != name and meets(*sorted((name, other))))


def _joined(names: tuple[str, ...], size: int, left: dict[str, set[str]], draw: random.Random) -> tuple[str, ...]:
    """These and further rows, those first that are to meet most of them; sorted."""
    while len(names) < size:
        places = frozenset.intersection(*map(places_of, names))
        counts = {
            name: sum(name in left[other] or other in left[name] for other in names)
            for name in sorted(frozenset.intersection(*map(partners, names)))
            if not places.isdisjoint(places_of(name))
        }
        if not (most := max(counts.values(), default=0)):
            break
        names = (*names, draw.choice([name for name, count in counts.items() if count == most]))
    return tuple(sorted(names))


def _place(names: tuple[str, ...], draw: random.Random, used: Counter) -> Place:
    """The kind and the axis on which fewest cells have been, of those that all rows have and none is refused on."""
    places = sorted(frozenset.intersection(*map(places_of, names)))
    draw.shuffle(places)
    served = [(kind, axis) for kind, axis in places if not barred() & {(kind, axis), *((name, axis) for name in names)}]
    kind, axis = min(served or places, key=lambda place: (used[place[0]] + used[place[1]], used[place]))
    used.update([kind, axis, (kind, axis)])
    return kind, axis


@cache
def barred() -> frozenset[tuple[str, str]]:
    """(kind, axis) and (row, axis) of which the golden table has a refusal."""
    found = set()
    for (name, kind, axis), verdict in verdicts.read().items():
        if verdict.word == REFUSED:
            found.add((kind if verdict.detail in KINDS[kind].refused else name, axis))
    return frozenset(found)


def cell_of_turn(name: str, turn: int) -> Cell:
    """A row with one of those that it meets; each turn has another one, on another axis."""
    others = sorted(partners(name), key=lambda other: number_of(name, other))
    names = tuple(sorted((name, others[turn % len(others)])))
    return ("+".join(names), *_place(names, random.Random(number_of(name, str(turn))), Counter()))


def is_on_processes(cell: Cell) -> bool:
    return AXES[cell[2]].world_size in (2, 4) and number_of("processes", *cell) % _ON_PROCESSES == 0


def run_pair(name: str, kind: str, axis: str) -> Verdict:
    """A cell of several rows, of which a tenth has ranks that are processes."""
    cell = (name, kind, axis)
    return run_cell(*cell, pool=pool_of(AXES[axis].world_size) if is_on_processes(cell) else None)
