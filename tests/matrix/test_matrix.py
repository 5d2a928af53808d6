"""Cells of the matrix are what the golden table says. `python -m tests.matrix pass` runs all of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import verdicts
from tests.matrix.axes import AXES
from tests.matrix.cells import REFUSED, RIGHT, run_cell
from tests.matrix.drawing import axes_of_slice, is_in_make_test, is_process_in_make_test, on_processes, rows
from tests.matrix.shrink import shrink
from tests.matrix.verdicts import Cell

_SHRINK_S = 30.0

_ADVICE = {
    verdicts.NEW: "no verdict of this cell is recorded",
    verdicts.BETTER: "it was refused before",
    verdicts.CHANGED: "it was refused for another reason",
    verdicts.LOST: "it was right before",
    verdicts.FAILED: "a cell is right, or refused by name",
}

golden = cache(verdicts.read)


def params(cells: list[tuple[str, ...]], in_make_test: Any) -> list[Any]:
    return [
        pytest.param(*cell, id="-".join(cell), marks=[] if in_make_test(cell) else [pytest.mark.sweep])
        for cell in cells
    ]


def check(cell: Cell, pool: Any = None) -> None:
    verdict = run_cell(*cell, pool=pool)
    recorded = golden().get(cell)
    how = verdicts.compare(verdict, recorded)
    if how == verdicts.SAME:
        return
    feature, kind, axis = cell
    text = [f"{feature} {kind} {axis}: {verdict}", f"recorded: {recorded or 'nothing'}; {_ADVICE[how]}"]
    if how in verdicts.RECORDABLE:
        text.append(f"to record it: python -m tests.matrix pass --feature {feature} --kind {kind} --record")
    else:
        text += [f"alone: python -m tests.matrix run {feature} {kind} {axis}", verdict.trace, made_small(cell, pool)]
    pytest.fail("\n".join(text), pytrace=False)


def made_small(cell: Cell, pool: Any) -> str:
    """The smallest cell that fails so, with a script that shows it."""
    small, verdict = shrink(*cell, seconds=_SHRINK_S)
    if verdict.word == RIGHT:
        return f"on {'threads' if pool is not None else 'its own'} it is right"
    return f"made small, {small}: {verdict}\n\n{small.script()}"


@pytest.mark.drawn_anew
@pytest.mark.parametrize(("feature", "kind"), params(list(rows()), is_in_make_test))
def test_a_feature_is_right_or_refused_as_recorded(feature, kind, request):
    """One axis; in the sweep a few others, which the number of the slice chooses."""
    number = request.config.getoption("slice")
    is_swept = request.node.get_closest_marker("sweep") is not None
    axes = axes_of_slice((feature, kind), number or 0) if is_swept else rows()[feature, kind][:1]
    for axis in axes:
        check((feature, kind, axis))


@pytest.mark.on_cpus("batches and models are made on the CPU")
@pytest.mark.parametrize(("feature", "kind", "axis"), params(on_processes(), is_process_in_make_test))
def test_a_cell_on_processes_is_what_it_is_on_threads(feature, kind, axis, two_processes, four_processes):
    check((feature, kind, axis), two_processes if AXES[axis].world_size == 2 else four_processes)


def test_every_cell_has_a_record_and_every_record_a_cell():
    cells, recorded = set(verdicts.all_cells()), set(golden())
    advice = "run `python -m tests.matrix pass --record`"
    assert not cells - recorded, f"{len(cells - recorded)} cells without a record: {advice}"
    assert not recorded - cells, f"{len(recorded - cells)} records without a cell: {advice}"


def test_what_is_refused_of_decoders_and_mixtures_has_its_reason_in_the_limits():
    limits = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    slugs = {
        verdict.detail
        for (_, kind, _), verdict in golden().items()
        if verdict.word == REFUSED and kind in ("llama", "mixture")
    }
    assert slugs and not {slug for slug in slugs if f"`{slug}`" not in limits}


def test_at_most_an_eighth_is_refused():
    table = golden()
    assert sum(verdict.word == REFUSED for verdict in table.values()) <= 0.12 * len(table)
