"""A planned decoder layer compiles whole, with the numbers and the collectives of the eager one."""

from __future__ import annotations

import shutil

import pytest

from tests.axes.tensor import compile_jobs as jobs
from tests.axes.tensor import overlap_jobs

pytestmark = pytest.mark.processes
DROPOUT = {"resid_pdrop": 0.5, "attn_pdrop": 0.5}
BACKENDS = ["aot_eager", *(["inductor"] if shutil.which("g++") else [])]


@pytest.mark.sweep
@pytest.mark.parametrize("overlap", ["off", "chunked"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_numbers(two_processes, backend, sequence_parallel, overlap):
    for result in two_processes.run(jobs.compiled, backend, sequence_parallel, overlap, timeout_s=240):
        assert max(result["output"], result["gradients"]) < 1e-12, result


@pytest.mark.sweep
def test_same_collectives_for_tensor_parallelism(two_processes):
    result = two_processes.run(jobs.compiled, "counting", False, timeout_s=240)[0]
    assert result["compiled"] == {"forward all_reduce": 2, "backward all_reduce": 2}


@pytest.mark.sweep
def test_same_collectives_for_sequence_parallelism(two_processes):
    """The mirror in backward; pending reductions leave the graph and are summed together after backward, as in eager
    mode."""
    result = two_processes.run(jobs.compiled, "counting", True, timeout_s=240)[0]
    assert result["compiled"] == {
        "forward all_gather": 2,
        "forward reduce_scatter": 2,
        "backward all_gather": 2,
        "backward reduce_scatter": 2,
    }
    assert result["step"] == result["eager step"]


@pytest.mark.sweep
@pytest.mark.parametrize("whole", [False, True], ids=["layer", "model"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_compiled_modules_follow_their_parameters(two_processes, sequence_parallel, whole):
    for errors in two_processes.run(jobs.compiled_then_changed, sequence_parallel, whole, timeout_s=240):
        assert max(errors) < 1e-12, errors


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("whole", [False, True], ids=["layer", "model"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_graphs_read_plain_tensors(two_processes, sequence_parallel, whole):
    """DTensors at the edge of a graph cost the host more than the rest of a small layer."""
    for num_dtensors in two_processes.run(jobs.dtensors_of_graphs, sequence_parallel, whole, timeout_s=240):
        assert len(num_dtensors) > 1 and not any(num_dtensors), num_dtensors


CASES = [
    ("llama", {"cp": 2}, {}, {}),
    ("llama", {"cp": 2}, {"ulysses": 2}, {}),
    ("llama", {"dp": 2}, {"zero": 1}, {}),
    ("llama", {"dp": 2}, {"zero": 2}, {}),
    ("llama", {"dp": 2}, {"zero": 3}, {}),
    ("gpt2", {"tp": 2}, {"sequence_parallel": True}, DROPOUT),
    ("gpt2", {"tp": 2}, {"sequence_parallel": True, "recompute": "full"}, DROPOUT),
    ("gpt2", {"tp": 2}, {"recompute": "selective"}, DROPOUT),
    ("mixtral", {"tp": 2}, {"sequence_parallel": True}, {}),
    ("mixtral", {"dp": 2}, {"ep": 2}, {}),
    ("mixtral", {"dp": 2}, {"ep": 2, "recompute": "full"}, {}),
    ("mixtral", {"dp": 2}, {"ep": 2, "zero": 3}, {}),
    ("mixtral", {"dp": 2}, {"etp": 2}, {}),
    ("deepseek_v3", {"tp": 2}, {"ep": 2, "sequence_parallel": True}, {}),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "axes", "options", "config"), CASES, ids=str)
def test_compiled_layers_of_the_whole_mesh(two_processes, family, axes, options, config):
    """Experts' tokens travel outside of graphs, whose messages have sizes that the ranks tell each other.

    A recomputed unit is one graph or none; with such experts or with dropout it is none.
    """
    has_graphs = "recompute" not in options
    arguments = (family, axes, options, config)
    for num_graphs, errors in two_processes.run(jobs.steps_of_compiled_layers, *arguments, timeout_s=240):
        assert num_graphs or not has_graphs
        assert max(errors) < 1e-12, errors


@pytest.mark.sweep
def test_collectives_of_plain_tensors(two_processes):
    """Of which graphs of torch 2.11 drop the gradient where a result is the same tensor as another value."""
    for errors in two_processes.run(jobs.compiled_collectives, timeout_s=240):
        assert max(max(pair) for pair in errors.values()) < 1e-12, errors


def test_overlapped_linears_are_in_the_graph(two_processes):
    result = two_processes.run(overlap_jobs.compiled_ops, timeout_s=240)[0]
    assert result["forward"] == {"all_gather_linear": 2, "linear_reduce_scatter": 2}
    assert result["backward"] == {"all_gather_linear_backward": 2, "linear_reduce_scatter_backward": 2}
