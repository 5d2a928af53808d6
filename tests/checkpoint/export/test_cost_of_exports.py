"""One exchange a bucket, and no more memory than two buckets, on two real processes."""

from __future__ import annotations

import pytest

from tests.checkpoint.export import export_jobs as jobs

pytestmark = pytest.mark.processes
BUCKET = 32_000


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"pp": 2}, {}),
        ({"dp": 2}, {"zero": 3}),
        pytest.param({"tp": 2}, {}, marks=pytest.mark.sweep),
        pytest.param({"dp": 2}, {"zero": 1}, marks=pytest.mark.sweep),
    ],
)
def test_memory_is_two_buckets_and_each_has_one_exchange(two_processes, axes, options):
    for buckets, calls, peak, num_bytes in two_processes.run(jobs.peak_and_calls, axes, options, BUCKET):
        assert buckets > 5 and calls == buckets
        assert peak <= 2 * BUCKET, f"{peak / BUCKET:.2f} buckets"
        assert peak > BUCKET * 0.8 and num_bytes > 5 * BUCKET, "the count sees what is allocated"


@pytest.mark.on_cpus("exported weights are compared with those of a module there")
def test_dtypes_and_names_are_those_asked_for(two_processes):
    assert two_processes.run(jobs.devices_and_types) == [True, True]
