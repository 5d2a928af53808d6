"""ZeRO without other tools: every optimizer, predicted memory, mixed precision, plain training loops."""

from __future__ import annotations

import pytest

from tests.axes.zero import zero_jobs as jobs

pytestmark = pytest.mark.processes

NEED_FULL_PARAMETERS = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


@pytest.mark.sweep
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_optimizer_steps_as_unsharded_or_is_refused_by_name(four_processes, zero):
    for errors in four_processes.run(jobs.optimizer_parity, zero, {"dp": 2, "tp": 2}):
        assert set(jobs.OPTIMIZERS) | NEED_FULL_PARAMETERS <= set(errors)
        assert {name for name, value in errors.items() if value == "not-elementwise"} == NEED_FULL_PARAMETERS
        assert max(value for value in errors.values() if isinstance(value, float)) < 1e-12, errors


@pytest.mark.variants(every=10)
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_is_what_the_arithmetic_says(four_processes, zero, axes, mixed):
    for measured, arithmetic in four_processes.run(jobs.memory, zero, axes, mixed):
        assert measured == arithmetic


@pytest.mark.variants(every=41)
@pytest.mark.parametrize("late", [False, True], ids=["each backward", "accumulated"])
@pytest.mark.parametrize("planned", [False, True], ids=["plain", "planned"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_loops_written_by_hand(four_processes, zero, planned, late):
    assert max(four_processes.run(jobs.plain_loop, zero, planned, late)) < 1e-12


@pytest.mark.variants(every=22)
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bfloat16_compute_with_float32_weights_and_sums(four_processes, zero, axes):
    for gradients, weights in four_processes.run(jobs.mixed_precision, zero, axes):
        assert gradients < 64 * 2**-8  # matmuls rounded to bfloat16, in the small gradients of norms
        assert weights < 1e-6  # float32 copies lose nothing


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parameters_used_on_some_ranks_or_on_none(four_processes, zero):
    assert max(four_processes.run(jobs.unused_parameters, zero)) < 1e-12


def test_a_gradient_that_is_not_a_number_stops_every_rank_by_name(four_processes):
    for message, unchanged in four_processes.run(jobs.nan_gradient):
        assert all(text in message for text in ("nonfinite-gradients", "layers.0.mlp.down_proj.weight", "rank 2"))
        assert unchanged


@pytest.mark.parametrize(("zero", "defer", "times"), [(0, False, 1), (1, False, 1), (2, False, 4), (2, True, 1)])
def test_when_gradients_are_reduced(four_processes, zero, defer, times):
    """Stages 0 and 1 in the last of four backwards, stage 2 in each, or once with `defer`."""
    assert set(four_processes.run(jobs.messages, zero, defer, 4)) == {times}


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_weights_loaded_late_are_the_ones_that_train(four_processes, zero, mixed):
    for error, slug in four_processes.run(jobs.loads_weights, zero, mixed):
        assert error <= (2**-8 if mixed else 0.0) and slug == "parameter-replaced"
