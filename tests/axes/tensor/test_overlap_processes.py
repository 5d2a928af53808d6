"""The overlapped linears between real processes: numbers, bits, memory, failures, graphs, and `auto`."""

from __future__ import annotations

import pytest
import torch

from tests.axes.tensor import overlap_jobs
from tests.support import device
from tests.support.linears import OPS

pytestmark = pytest.mark.processes
ALGORITHMS = [{"overlap": "off"}, {"overlap": "chunked", "chunks": 3}]


@pytest.mark.parametrize("op", OPS)
def test_four_ranks_equal_the_unsharded_linear(four_processes, op):
    four_processes.run(overlap_jobs.equal_unsharded, op, ALGORITHMS)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("op", OPS)
def test_results_do_not_depend_on_the_chunks(two_processes, op):
    """fp32: outputs and input gradients bit-equal to sync where the kernel computes a row alike in any batch of rows,
    else to rounding; weight gradients to rounding; repeats always bit-equal."""
    rounding = (
        1e-6 if device.CHOSEN == "cpu" else 2e-6
    )  # a GPU has other kernels, with other sums, for other numbers of rows
    for size in (512, 1024):
        for result in two_processes.run(overlap_jobs.bits, op, torch.float32, size, size):
            assert result["again"] == 0
            for name in ("out", "dx"):
                assert result[name] <= (0.0 if result[f"kernel {name}"] else rounding), result
            assert result["dw"] <= 2e-6, result


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_bound_where_kernels_round_otherwise(four_processes, op, dtype):
    bound = {torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    for result in four_processes.run(overlap_jobs.bits, op, dtype, 24, 16):
        assert result["again"] == 0 and max(result[name] for name in ("out", "dx", "dw")) <= bound, result


@pytest.mark.parametrize("chunks", [2, 4])
def test_peak_memory_of_a_gather(four_processes, chunks):
    """No more than the gathered input, the output, and one chunk."""
    for result in four_processes.run(overlap_jobs.peak_memory, "gather", chunks):
        assert result["wanted"] <= result["most"] <= result["wanted"] + result["chunk"], result


def test_peak_memory_of_a_scatter(four_processes):
    """No more than without overlap: partial sums sent and received, and local rows."""
    sync = four_processes.run(overlap_jobs.peak_memory, "scatter", 0)[0]["most"]
    for result in four_processes.run(overlap_jobs.peak_memory, "scatter", 4):
        assert result["most"] <= sync + result["chunk"], (result, sync)


@pytest.mark.parametrize("differs", ["rows", "dtype"])
def test_ranks_that_disagree(two_processes, differs):
    for message, following in two_processes.run(overlap_jobs.disagree, differs):
        assert "ranks-disagree" in message and "rank 0" in message and "rank 1" in message
        assert {"rows": "8 over dim 0", "dtype": "torch.float32"}[differs] in message
        assert {"rows": "12 over dim 0", "dtype": "torch.int32"}[differs] in message
        assert following == 8 * 4


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_a_failure_in_the_middle(two_processes, op, everywhere):
    """The failing rank raises; a peer that needs its results gets NaN, never a wrong number; the next step is right."""
    first, second = two_processes.run(overlap_jobs.fails_in_the_middle, op, everywhere)
    assert second == "raised"
    assert first == "raised" if everywhere else first in ("ok", "nan")
    if not everywhere and op in ("linear_reduce_scatter", "linear_all_reduce"):
        assert first == "nan"


def test_a_failure_while_rows_are_gathered_again(two_processes):
    assert two_processes.run(overlap_jobs.fails_while_gathering_again, timeout_s=60) == ["through", "raised"]


@pytest.mark.sweep
def test_a_silent_peer_is_an_error_within_the_timeout(two_processes):
    messages = two_processes.run(overlap_jobs.waits_for_silent_peer, timeout_s=30)
    assert messages[1] == "silent" and messages[0] != "nothing"


@pytest.mark.parametrize("on_dtensors", [False, True], ids=["ranks", "dtensors"])
def test_compiled(two_processes, on_dtensors):
    assert max(two_processes.run(overlap_jobs.compiled_calls, on_dtensors, timeout_s=240)) < 1e-12


def test_auto_measures_once_and_says_why(two_processes):
    for result in two_processes.run(overlap_jobs.auto_on_a_mesh):
        profile = result["profile"]
        assert profile["bytes_per_s"] > 1e6 and profile["flops"] > 1e8 and 0 <= profile["hidden"]["chunked"] <= 1
        assert result["again"] and result["error"] < 1e-12
        assert "communication" in result["report"] and "ms" in result["report"]
        assert all(calls == 1 for calls, _ in result["calls"].values())


def test_ranks_choose_alike(four_processes):
    reports = {result["report"] for result in four_processes.run(overlap_jobs.auto_on_a_mesh)}
    assert len(reports) == 1


@pytest.mark.sweep
def test_nothing_stays_alive(two_processes):
    for counts in two_processes.run(overlap_jobs.nothing_stays):
        assert counts[3] <= counts[1], counts  # what earlier jobs left may still go


def test_all_messages_of_a_gather_are_posted_before_the_first_matmul(two_processes):
    for result in two_processes.run(overlap_jobs.link_is_busy_during_matmuls):
        assert result["posts before matmuls"] == result["posts"] > 1
