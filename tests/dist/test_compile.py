"""A planned decoder layer compiles whole, with the numbers and the collectives of the eager one."""

from __future__ import annotations

import shutil

import pytest

from tests.dist import jobs

pytestmark = pytest.mark.processes
BACKENDS = ["aot_eager", *(["inductor"] if shutil.which("g++") else [])]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_numbers(two_processes, backend, sequence_parallel):
    for found in two_processes.run(jobs.compiled, backend, sequence_parallel, timeout_s=240):
        assert max(found["output"], found["gradients"]) < 1e-12, found


def test_same_collectives_for_tensor_parallelism(two_processes):
    found = two_processes.run(jobs.compiled, "counting", False, timeout_s=240)[0]
    assert found["compiled"] == {"forward all_reduce": 2, "backward all_reduce": 2}


def test_same_activation_collectives_for_sequence_parallelism(two_processes):
    """Owed gradients differ: eager coalesces them after backward, a graph holds one a parameter, for compilers to bucket."""
    found = two_processes.run(jobs.compiled, "counting", True, timeout_s=240)[0]
    compiled = found["compiled"]
    assert {key: n for key, n in compiled.items() if "all_reduce" not in key} == {
        "forward all_gather": 2,
        "forward reduce_scatter": 2,
        "backward all_gather": 2,
        "backward reduce_scatter": 2,
    }
    assert compiled["backward all_reduce"] == 3  # two norms and the bias of o_proj
