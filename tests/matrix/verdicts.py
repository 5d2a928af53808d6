"""The golden table: what each cell was when it was last recorded, in `golden.txt`, and what became of it since.

A line has the axes of one feature, kind and verdict, in the order of `AXES`:

    clip llama right: one dp-zero0 dp-zero1
    clip llama refused cache-over-cp: cp-ring cp4

Only cells that are right or refused are recorded. A later run may turn a refusal into a right cell; nothing that was
right may be refused, and nothing may be wrong or crash.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.matrix.axes import AXES
from tests.matrix.cells import REFUSED, RIGHT, Verdict, cells_of
from tests.matrix.feature import Feature, load_features
from tests.matrix.kinds import KINDS

Cell = tuple[str, str, str]
Table = dict[Cell, Verdict]

GOLDEN = Path(__file__).with_name("golden.txt")
SAME, BETTER, CHANGED, NEW = "same", "better", "changed", "new"
"""What a cell may be beside its record: the last three are to be recorded."""
LOST, FAILED = "lost", "failed"
"""What it may not be: right before and refused now; wrong or crashed."""
RECORDABLE = (SAME, BETTER, CHANGED, NEW)


_FULL_KIND = "llama"
_PRODUCTS, _OF_EXPERTS, _OTHERS = 4, 3, 2  # axes that are drawn: of this kind, of experts, of each other kind


def all_cells() -> list[Cell]:
    """Every cell of the table, those of a feature and kind together.

    Each feature on every mesh of two ranks for one kind of model, and on four larger ones; for the other kinds on two
    meshes, and on three of those of experts if they have any. What is not all is drawn by hash, so that over all
    features each kind has been on each axis. `run` takes any cell.
    """
    return [(name, kind, axis) for name, row in load_features().items() for kind in KINDS for axis in _axes(row, kind)]


def _axes(row: Feature, kind: str) -> list[str]:
    possible = cells_of(row, kind)
    is_full = kind == _FULL_KIND
    fixed = [name for name in possible if is_full and AXES[name].world_size <= 2]
    drawn = sorted(set(possible) - set(fixed), key=lambda name: _hash(row.name, kind, name))
    of_experts = [name for name in drawn if AXES[name].mixture]
    others = [name for name in drawn if not AXES[name].mixture]
    chosen = {*fixed, *of_experts[:_OF_EXPERTS], *others[: _PRODUCTS if is_full else _OTHERS]}
    return [name for name in possible if name in chosen]


def _hash(*names: str) -> int:
    return zlib.crc32(" ".join(names).encode())


def compare(verdict: Verdict, recorded: Verdict | None) -> str:
    """How a verdict stands to the recorded one."""
    if verdict.word not in (RIGHT, REFUSED):
        return FAILED
    if recorded is None:
        return NEW
    if str(verdict) == str(recorded):
        return SAME
    if recorded.word == RIGHT:
        return LOST
    return BETTER if verdict.word == RIGHT else CHANGED


def merged(table: Mapping[Cell, Verdict], found: Mapping[Cell, Verdict], cells: Iterable[Cell]) -> Table:
    """The table with what was found, of the cells that there are. What may not be keeps its record."""
    new: Table = {}
    for cell in cells:
        recorded, verdict = table.get(cell), found.get(cell)
        if verdict is not None and compare(verdict, recorded) in RECORDABLE:
            recorded = Verdict(verdict.word, verdict.detail)
        if recorded is not None:
            new[cell] = recorded
    return new


def read(path: Path = GOLDEN) -> Table:
    table: Table = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        head, _, axes = line.partition(": ")
        feature, kind, word, *slug = head.split()
        for axis in axes.split():
            cell = (feature, kind, axis)
            assert cell not in table, f"{cell} stands twice in {path.name}"
            table[cell] = Verdict(word, *slug)
    return table


def write(table: Mapping[Cell, Verdict], path: Path = GOLDEN) -> None:
    path.write_text("".join(f"{line}\n" for line in lines(table)))


def lines(table: Mapping[Cell, Verdict]) -> list[str]:
    """The text of a table, sorted by feature, in the order of kinds, the right cells first."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for (feature, kind, axis), verdict in table.items():
        groups.setdefault((feature, kind, str(verdict)), []).append(axis)
    kinds, axes = list(KINDS), list(AXES)
    ordered = sorted(groups, key=lambda group: (group[0], kinds.index(group[1]), group[2] != RIGHT, group[2]))
    return [f"{' '.join(group)}: {' '.join(sorted(groups[group], key=axes.index))}" for group in ordered]
