"""A planned decoder layer compiles whole, with the numbers and the collectives of the eager one."""

from __future__ import annotations

import shutil

import pytest

from tests.tensor import jobs, overlap_jobs

pytestmark = pytest.mark.processes
BACKENDS = ["aot_eager", *(["inductor"] if shutil.which("g++") else [])]


@pytest.mark.sweep
@pytest.mark.parametrize("overlap", ["off", "chunked"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_numbers(two_processes, backend, sequence_parallel, overlap):
    for result in two_processes.run(jobs.compiled, backend, sequence_parallel, overlap, timeout_s=240):
        assert max(result["output"], result["gradients"]) < 1e-12, result


def test_same_collectives_for_tensor_parallelism(two_processes):
    result = two_processes.run(jobs.compiled, "counting", False, timeout_s=240)[0]
    assert result["compiled"] == {"forward all_reduce": 2, "backward all_reduce": 2}


@pytest.mark.sweep
def test_same_collectives_for_sequence_parallelism(two_processes):
    """The mirror in backward; pending reductions leave the graph and are summed together after backward, as in eager mode."""
    result = two_processes.run(jobs.compiled, "counting", True, timeout_s=240)[0]
    assert result["compiled"] == {
        "forward all_gather": 2,
        "forward reduce_scatter": 2,
        "backward all_gather": 2,
        "backward reduce_scatter": 2,
    }
    assert result["step"] == result["eager step"]


@pytest.mark.sweep
def test_a_compiled_layer_follows_its_parameters(two_processes):
    for result in two_processes.run(jobs.compiled_then_changed, timeout_s=240):
        assert max(result) < 1e-12, result


def test_overlapped_linears_are_in_the_graph(two_processes):
    result = two_processes.run(overlap_jobs.compiled_ops, timeout_s=240)[0]
    assert result["forward"] == {"all_gather_linear": 2, "linear_reduce_scatter": 2}
    assert result["backward"] == {"all_gather_linear_backward": 2, "linear_reduce_scatter_backward": 2}
