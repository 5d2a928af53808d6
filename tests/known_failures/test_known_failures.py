"""Every public failure that was rebuilt here is found, or its loop gives the answer of one process."""

from __future__ import annotations

import pytest

from tests.known_failures.failure import Failure, load_failures
from tests.known_failures.page import PAGE, written
from tests.known_failures.runner import verdict_of
from tests.matrix.cells import REFUSED, RIGHT
from tests.support.mutants import judge

FAILURES = load_failures()
LOOPS = [failure for failure in FAILURES.values() if failure.place is not None]
PLANS = [failure for failure in FAILURES.values() if failure.place is None]


def named(failures: list[Failure]) -> dict:
    return {"argvalues": failures, "ids": [failure.name for failure in failures]}


@pytest.mark.parametrize("failure", **named([each for each in LOOPS if not each.place.processes]))
def test_a_loop(failure):
    check(failure)


@pytest.mark.on_cpus("batches and models are made on the CPU")
@pytest.mark.parametrize("failure", **named([each for each in LOOPS if each.place.processes]))
def test_a_loop_on_processes(failure, two_processes):
    check(failure, two_processes)


def check(failure, pool=None):
    verdict = verdict_of(failure, pool)
    wanted = RIGHT if failure.answer == RIGHT else f"{REFUSED} {failure.answer}"
    assert str(verdict) == wanted, f"{verdict}\n{verdict.trace}"


@pytest.mark.parametrize("failure", **named(PLANS))
def test_a_plan(failure):
    mutant, model, mesh = failure.run()
    judgment = judge(mutant, model, [mesh])
    assert judgment.by == failure.told and judgment.named
    assert failure.answer in judgment.message, judgment.message


def test_the_page_has_a_row_for_each_of_them():
    assert PAGE.read_text() == written(PAGE.read_text()), "run `python -m tests.known_failures.page`"


def test_there_are_enough_of_them_and_most_are_recent():
    reports = {failure.report for failure in FAILURES.values()}
    recent = {failure.report for failure in FAILURES.values() if failure.month >= "2025-10"}
    assert len(reports) >= 20 and len(recent) >= 0.9 * len(reports)
