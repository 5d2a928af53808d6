"""Mistakes that a review of pipelines and ZeRO found, each of which was silent, hung, or poisoned what came after."""

from __future__ import annotations

import pytest

from tests.dist import review_jobs as jobs

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_after_a_failed_one_is_right(two_processes, four_processes, zero, backward):
    assert max(two_processes.run(jobs.fails_then_works, {"dp": 2}, {"zero": zero}, backward, True)) < 1e-12
    assert max(four_processes.run(jobs.fails_then_works, {"pp": 2, "dp": 2}, {"zero": zero}, backward, True)) < 1e-12
    if zero < 3:  # `fully_shard` waits for the rank that failed alone
        assert max(two_processes.run(jobs.fails_then_works, {"dp": 2}, {"zero": zero}, backward, False)) < 1e-12


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble"])
def test_deferred_reduction_under_schedules_that_split(four_processes, schedule):
    options = {"zero": 3, "defer": True, "schedule": schedule}
    assert max(four_processes.run(jobs.fails_then_works, {"pp": 2, "dp": 2}, options, False, True)) < 1e-12


STEPS = [
    jobs.an_exception_in_a_loop_by_hand,
    jobs.a_derivative_between,
    jobs.two_optimizers,
    jobs.clipping_by_groups,
    jobs.large_parameters,
]


@pytest.mark.parametrize("job", STEPS, ids=lambda job: job.__name__)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_loops_by_hand(two_processes, zero, job):
    assert max(two_processes.run(job, zero)) < 1e-12


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_scalars_strides_and_few_rows(four_processes, zero, fused):
    assert max(four_processes.run(jobs.odd_shapes, zero, fused)) < 1e-12


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_many_narrow_gradients_are_summed_in_float32(two_processes, zero):
    assert max(two_processes.run(jobs.many_narrow_microbatches, zero)) == 0.0


def test_split_backwards_beside_overlapped_linears(four_processes):
    assert max(four_processes.run(jobs.halves_beside_overlap)) < 1e-12


def test_data_ranks_have_lengths_of_their_own(four_processes):
    assert max(four_processes.run(jobs.lengths_of_their_own)) < 1e-12
