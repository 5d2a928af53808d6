"""Which cells a run of the tests takes: drawn by hash of their names, others in each slice of the sweep."""

from __future__ import annotations

import zlib
from functools import cache

from tests.matrix.axes import AXES
from tests.matrix.feature import load_features
from tests.matrix.verdicts import Cell, all_cells

SLICES = 8  # of the sweep, as in tests/conftest.py
_IN_MAKE_TEST = 16  # one of so many features of a kind has a cell in `make test`
_OF_A_SLICE = 2  # cells of a feature and kind
_ON_PROCESSES = 10  # one of so many cells of at most four ranks runs on processes too
_PROCESSES_IN_MAKE_TEST = 16  # one of so many of these in `make test`


def number_of(*names: str) -> int:
    return zlib.crc32(" ".join(names).encode())


@cache
def rows() -> dict[tuple[str, str], list[str]]:
    """(feature, kind) to its axes, in an order that is drawn; of features whose ranks may be threads."""
    axes: dict[tuple[str, str], list[str]] = {}
    for cell in all_cells():
        if not _needs_processes(cell):
            axes.setdefault(cell[:2], []).append(cell[2])
    return {row: sorted(names, key=lambda name: number_of(*row, name)) for row, names in axes.items()}


def is_in_make_test(row: tuple[str, str]) -> bool:
    return number_of(*row) % _IN_MAKE_TEST == 0


def axes_of_slice(row: tuple[str, str], number: int) -> list[str]:
    """A few axes of the row, which move on with every round of slices: each round runs each row once."""
    axes = rows()[row]
    first = number // SLICES * _OF_A_SLICE
    return list(dict.fromkeys(axes[(first + further) % len(axes)] for further in range(1, _OF_A_SLICE + 1)))


@cache
def on_processes() -> list[Cell]:
    """A tenth of the cells with two or four ranks, and all of features whose ranks are processes always."""
    return [
        cell
        for cell in all_cells()
        if AXES[cell[2]].world_size in (2, 4)
        and (_needs_processes(cell) or number_of("processes", *cell) % _ON_PROCESSES == 0)
    ]


def _needs_processes(cell: Cell) -> bool:
    return load_features()[cell[0]].processes


def is_process_in_make_test(cell: Cell) -> bool:
    return number_of(*cell) % _PROCESSES_IN_MAKE_TEST == 0
