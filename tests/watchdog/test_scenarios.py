"""A rank that dies, raises, hangs, leaves the loop or goes another way: every other rank ends by itself and names
it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.watchdog.faults import TIMEOUT_S
from tests.watchdog.scenarios import SCENARIOS, run, seconds_of, wrong_with

MACHINE_IS_BUSY_S = 20.0
"""What processes that share two cores may be late."""
IN_EVERY_RUN = {"dp x tp: raises in the backward", "zero3: sleeps in the forward", "tp: another length"}
DOCUMENT = Path(__file__).parents[2] / "docs" / "when-a-run-stops.md"


@pytest.mark.processes
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(scenario, marks=() if str(scenario) in IN_EVERY_RUN else pytest.mark.sweep)
        for scenario in SCENARIOS
    ],
    ids=str,
)
def test_the_others_end_and_name_the_rank(scenario, tmp_path):
    ended = run(scenario, tmp_path)
    texts = "\n".join(f"-- {end.status}\n{end.text}" for end in ended)
    assert not wrong_with(scenario, ended), texts
    seconds = seconds_of(ended, tmp_path)
    assert seconds is None or seconds < TIMEOUT_S + 5 + MACHINE_IS_BUSY_S, texts


def test_every_run_has_its_scenarios():
    assert {str(scenario) for scenario in SCENARIOS} >= IN_EVERY_RUN
    assert len({str(scenario) for scenario in SCENARIOS}) == len(SCENARIOS)


def test_the_document_has_the_table():
    rows = set(re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([a-z-]+)`", DOCUMENT.read_text(), re.MULTILINE))
    assert rows >= {(scenario.mesh, scenario.fault, scenario.slug) for scenario in SCENARIOS}
