"""A step after a failed one gives the gradients of a fresh run."""

from __future__ import annotations

import pytest

from tests.training import mesh_jobs as jobs

pytestmark = pytest.mark.processes


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("zero", [0, 1, 2])  # with ZeRO 3 `fully_shard` waits for the rank that failed alone
def test_a_step_after_a_failed_one_is_right(two_processes, zero, backward):
    for everywhere in (False, True):
        assert max(two_processes.run(jobs.fails_then_works, {"dp": 2}, {"zero": zero}, backward, everywhere)) < 1e-12


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble"])
def test_deferred_reduction_under_schedules_that_split(four_processes, schedule):
    options = {"zero": 3, "defer": True, "schedule": schedule}
    assert max(four_processes.run(jobs.fails_then_works, {"pp": 2, "dp": 2}, options, False, True)) < 1e-12


@pytest.mark.on_cpus("a GPU's lookup ends the process by an assertion")
@pytest.mark.parametrize(
    ("axes", "options"),
    [({"dp": 2}, {"zero": 3}), ({"dp": 2}, {"zero": 2}), ({"tp": 2}, {}), ({"pp": 2}, {"num_microbatches": 2})],
    ids=str,
)
def test_an_id_beyond_the_vocabulary_is_named(two_processes, axes, options):
    for text in two_processes.run(jobs.an_id_beyond_the_vocabulary, axes, options):
        assert "id-out-of-range: ids range from" in text and "10000, and the vocabulary has" in text, text
        assert "IndexError" not in text
