"""ZeRO by itself: every optimiser, memory as the arithmetic says, mixed precision, loops written by hand."""

from __future__ import annotations

import pytest

from tests.dist import zero_jobs as jobs

pytestmark = pytest.mark.processes

WHOLE = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_optimizer_steps_as_unsharded_or_is_refused_by_name(four_processes, zero):
    for found in four_processes.run(jobs.optimizer_parity, zero, {"dp": 2, "tp": 2}):
        assert set(jobs.OPTIMIZERS) | WHOLE <= set(found)
        assert {name for name, value in found.items() if value == "not-elementwise"} == WHOLE
        assert max(value for value in found.values() if isinstance(value, float)) < 1e-12, found


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_is_what_the_arithmetic_says(four_processes, zero, axes, mixed):
    for measured, arithmetic in four_processes.run(jobs.memory, zero, axes, mixed):
        assert measured == arithmetic


@pytest.mark.parametrize("late", [False, True], ids=["each backward", "accumulated"])
@pytest.mark.parametrize("planned", [False, True], ids=["plain", "planned"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_loops_written_by_hand(four_processes, zero, planned, late):
    assert max(four_processes.run(jobs.plain_loop, zero, planned, late)) < 1e-12


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bfloat16_compute_with_float32_weights_and_sums(four_processes, zero, axes):
    for gradients, weights in four_processes.run(jobs.mixed_precision, zero, axes):
        assert gradients < 64 * 2**-8  # products rounded to bfloat16, in the small gradients of norms
        assert weights < 1e-6  # float32 copies lose nothing


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parameters_used_on_some_ranks_or_on_none(four_processes, zero):
    assert max(four_processes.run(jobs.unused_parameters, zero)) < 1e-12


def test_a_gradient_that_is_not_a_number_stops_every_rank_by_name(four_processes):
    for told, kept in four_processes.run(jobs.nan_gradient):
        assert "nonfinite-gradients" in told and "model.layers.0.mlp.down_proj.weight" in told and "rank 2" in told
        assert kept


@pytest.mark.parametrize(("zero", "defer", "times"), [(0, False, 1), (1, False, 1), (2, False, 4), (2, True, 1)])
def test_when_gradients_travel(four_processes, zero, defer, times):
    """Stages 0 and 1 in the last of four backwards, stage 2 in each, or once where that is asked for."""
    assert set(four_processes.run(jobs.messages, zero, defer, 4)) == {times}


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_weights_loaded_late_are_the_ones_that_train(four_processes, zero, mixed):
    for error, told in four_processes.run(jobs.loads_weights, zero, mixed):
        assert error <= (2**-8 if mixed else 0.0) and told == "parameter-replaced"
