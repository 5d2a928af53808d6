"""A pass ends with a verdict for every cell, whatever a cell does, and records what may be recorded."""

from __future__ import annotations

import os
import time

import pytest

from tests.matrix import journal, passes, verdicts
from tests.matrix.cells import CRASHED, REFUSED, RIGHT, WRONG, Verdict
from tests.matrix.drawing import SLICES, axes_of_slice, rows
from tests.matrix.workers import run_cells

CELL = ("targets", "llama", "tp")
OTHER = ("targets", "llama", "cp-ring")
THIRD = ("targets", "llama", "one")


def strange(feature: str, kind: str, axis: str) -> Verdict:
    """A stand-in for `run_cell`."""
    if axis == "dies":
        os._exit(3)
    if axis == "hangs":
        time.sleep(600)
    if axis == "raises":
        raise ValueError("its reference fails")
    return Verdict(RIGHT)


@pytest.mark.processes
def test_a_worker_that_dies_or_hangs_is_a_crashed_cell_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr("tests.matrix.workers._START_S", 60.0)
    cells = [("a", "llama", axis) for axis in ("one", "dies", "tp", "hangs", "raises", "cp")]
    found = {outcome.cell[2]: outcome.verdict for outcome in run_cells(cells, workers=1, timeout_s=2.0, job=strange)}
    assert {axis: verdict.word for axis, verdict in found.items()} == {
        **dict.fromkeys(("one", "tp", "cp"), RIGHT),
        **dict.fromkeys(("dies", "hangs", "raises"), CRASHED),
    }
    assert "exit code 3" in found["dies"].detail
    assert "no verdict in 2 s" in found["hangs"].detail
    assert "its reference fails" in found["raises"].detail


@pytest.mark.parametrize(
    ("verdict", "recorded", "how"),
    [
        (Verdict(RIGHT), None, verdicts.NEW),
        (Verdict(RIGHT), Verdict(RIGHT), verdicts.SAME),
        (Verdict(RIGHT), Verdict(REFUSED, "a"), verdicts.BETTER),
        (Verdict(REFUSED, "a"), Verdict(REFUSED, "a"), verdicts.SAME),
        (Verdict(REFUSED, "b"), Verdict(REFUSED, "a"), verdicts.CHANGED),
        (Verdict(REFUSED, "a"), Verdict(RIGHT), verdicts.LOST),
        (Verdict(WRONG, "x"), None, verdicts.FAILED),
        (Verdict(CRASHED, "x"), Verdict(RIGHT), verdicts.FAILED),
    ],
)
def test_what_a_verdict_is_beside_its_record(verdict, recorded, how):
    assert verdicts.compare(verdict, recorded) == how


def test_the_table_is_written_and_read(tmp_path):
    table = {CELL: Verdict(RIGHT), THIRD: Verdict(RIGHT), OTHER: Verdict(REFUSED, "no-attention")}
    path = tmp_path / "golden.txt"
    verdicts.write(table, path)
    assert path.read_text() == "targets llama right: one tp\ntargets llama refused no-attention: cp-ring\n"
    assert verdicts.read(path) == table


def test_what_may_not_be_is_not_recorded():
    table = {CELL: Verdict(RIGHT), ("gone", "llama", "tp"): Verdict(RIGHT)}
    found = {CELL: Verdict(REFUSED, "a"), OTHER: Verdict(WRONG, "x"), THIRD: Verdict(RIGHT)}
    assert verdicts.merged(table, found, [CELL, OTHER, THIRD]) == {CELL: Verdict(RIGHT), THIRD: Verdict(RIGHT)}


def test_a_pass_goes_on_where_it_stopped_and_counts_failures(tmp_path, monkeypatch, capsys):
    runs = []

    def run(cells, **options):
        runs.append(len(cells))
        for cell in cells:
            yield passes.Outcome(cell, Verdict(WRONG, "x") if cell[2] == "tp" else Verdict(RIGHT), 1.0)

    monkeypatch.setattr(passes, "run_cells", run)
    options = dict(path=tmp_path / "journal.jsonl", golden=tmp_path / "golden.txt")
    assert passes.run_pass("targets", "llama", record=True, **options) == 1
    assert passes.run_pass("targets", "llama", **options) == 1
    assert passes.run_pass("targets", "llama", failed=True, **options) == 1
    assert runs[1:] == [0, 1]
    assert CELL not in verdicts.read(options["golden"])
    assert THIRD in verdicts.read(options["golden"])
    assert "targets llama tp: wrong x" in capsys.readouterr().out


def test_a_verdict_counts_for_the_sources_that_it_was_made_with(tmp_path):
    path = tmp_path / "journal.jsonl"
    entry = journal.Entry(*CELL, RIGHT, "", 1.0, journal.sources_of("targets"))
    journal.append(entry, path)
    journal.append(journal.Entry(*OTHER, RIGHT, "", 1.0, "earlier"), path)
    with path.open("a") as file:
        file.write('{"feature": "targ')
    assert journal.entries(path) == {CELL: entry}
    assert set(journal.entries(path, any_sources=True)) == {CELL, OTHER}


def test_slices_of_one_round_after_another_run_every_axis():
    row = ("targets", "llama")
    seen = {axis for turn in range(len(rows()[row])) for axis in axes_of_slice(row, turn * SLICES)}
    assert seen == set(rows()[row])
