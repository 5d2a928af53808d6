"""Generation over `cp` on real gloo processes, which sum through shared memory."""

from __future__ import annotations

import pytest

from tests.axes.context import generation_over_cp_jobs as jobs

pytestmark = pytest.mark.processes


@pytest.mark.sweep
def test_two_ranks(two_processes):
    assert two_processes.run(jobs.tokens_differ, "mistral", {"cp": 2, "tp": 1}, {}) == [[], []]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("sizes", "options"),
    [({"cp": 4, "tp": 1}, {"ulysses": 2}), ({"cp": 2, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True})],
)
def test_four_ranks(four_processes, sizes, options):
    assert four_processes.run(jobs.tokens_differ, "llama", sizes, options) == [[]] * 4
