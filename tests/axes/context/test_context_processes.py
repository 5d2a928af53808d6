"""Long sequences on real gloo processes."""

from __future__ import annotations

import pytest

from tests.axes.context import context_jobs as jobs

pytestmark = pytest.mark.processes

CASES = [
    ("llama", {"cp": 4}, {}, False),
    ("llama", {"cp": 4}, {"ulysses": 2}, True),
    ("mistral", {"cp": 4}, {"ulysses": 4}, False),
    ("bert", {"cp": 4}, {}, False),
    ("llama", {"cp": 2, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True}, True),
    ("llama", {"dp": 2, "cp": 2}, {"zero": 3, "recompute": "full"}, False),
    ("llama", {"pp": 2, "cp": 2}, {"num_microbatches": 2}, True),
]


@pytest.mark.sweep
@pytest.mark.variants(every=4)
@pytest.mark.parametrize(("name", "sizes", "options", "packed"), CASES)
def test_equals_one_process(four_processes, name, sizes, options, packed):
    for error, where in four_processes.run(jobs.equals_alone, name, sizes, options, packed):
        assert error <= 1e-12, where


@pytest.mark.parametrize("ulysses", [1, 2])
def test_two_ranks(two_processes, ulysses):
    for error, where in two_processes.run(jobs.equals_alone, "qwen3", {"cp": 2}, {"ulysses": ulysses}, False):
        assert error <= 1e-12, where


def test_a_checkpoint_moves_between_cp_and_dp(two_processes, tmp_path):
    """With sequences of several lengths, and clipping."""
    for over_cp, over_dp in two_processes.run(jobs.moved_between_meshes, str(tmp_path)):
        assert over_cp == pytest.approx(over_dp, rel=1e-12)
