"""Training loops written by hand give the same gradients as `step`."""

from __future__ import annotations

import pytest

from tests.training import mesh_jobs as jobs

pytestmark = pytest.mark.processes


JOBS = [
    jobs.an_exception_in_a_loop_by_hand,
    jobs.a_derivative_between,
    jobs.two_optimizers,
    jobs.clipping_by_groups,
    jobs.large_parameters,
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_loops_by_hand(two_processes, zero, job):
    assert max(two_processes.run(job, zero)) < 1e-12
