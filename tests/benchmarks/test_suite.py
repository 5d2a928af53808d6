"""`make bench` calls every benchmark with arguments that it takes; the tables of docs/measurements.md say what was
recorded."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from benchmarks import claims, measurements, record, suite

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("run", suite.RUNS, ids=lambda run: run.name)
@pytest.mark.parametrize("form", ["short", "full"])
def test_each_run_has_a_script_that_takes_its_arguments(run, form):
    source = (ROOT / "benchmarks" / f"{run.script}.py").read_text()
    for option in re.findall(r"--([a-z-]+)", getattr(run, form)):
        assert f'"--{option}"' in source or f'("{option}"' in source or f'"{option}":' in source, option
    assert '"--json"' in source and "write_record(" in source
    assert hasattr(importlib.import_module(f"benchmarks.{run.script}"), "main")


def test_each_claim_is_measured_by_a_run_of_the_suite():
    assert {claim.record for claim in claims.CLAIMS} <= {run.name for run in suite.RUNS}


def test_each_claim_has_as_many_figures_as_its_text_names():
    for claim in claims.CLAIMS:
        figures = claim.figures(record.read_record(claim.record)["result"])
        assert figures, claim.text
        named = claim.text.rpartition(": ")[2].count(" / ") + 1
        assert named in (1, len(figures)), claim.text


def test_the_document_says_what_was_recorded():
    assert measurements.main(["--check"]) == 0, "run `python -m benchmarks.measurements`"


def test_a_changed_record_changes_its_row_alone(tmp_path):
    for path in record.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    changed = json.loads((tmp_path / "zero.json").read_text())
    changed["result"]["results"][0]["ratio"] = {"median": 7.654, "low": 7.0, "high": 8.0}
    (tmp_path / "zero.json").write_text(json.dumps(changed))
    before, after = (measurements.table(claims.STEP, folder).splitlines() for folder in (record.RESULTS, tmp_path))
    differing = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(differing) == 1 and "7.65 [7.00, 8.00]" in differing[0]


def test_a_record_names_the_machine_and_no_person(tmp_path):
    record.write_record(tmp_path / "folder" / "x.json", {"value": 1})
    written = json.loads((tmp_path / "folder" / "x.json").read_text())
    assert written["result"] == {"value": 1} and written["machine"]["cores"] >= 1
    assert set(written["machine"]) <= {"cpu", "cores", "memory_gb", "system", "python", "torch", "gpu"}


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record.write_record(None, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.sweep
@pytest.mark.processes
def test_a_failing_run_is_named_and_the_others_go_on(tmp_path, capsys):
    runs = [suite.Run("broken", "no_such_script"), suite.Run("scale_of_nothing", "scale", "--help")]
    assert suite._run_all(runs, full=False, folder=tmp_path) == 1
    printed = capsys.readouterr()
    assert "broken" in printed.out and "failed" in printed.out and "no_such_script" in printed.err
    assert re.search(r"scale_of_nothing .* ok", printed.out)
