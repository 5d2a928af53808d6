"""ZeRO without other tools: which optimizers there are, predicted memory, mixed precision, the number of messages."""

from __future__ import annotations

import pytest
import torch

from parallelize import ModelError, parallelize_model
from tests.axes.zero import zero_jobs as jobs
from tests.matrix.features.optimizers import CLASSES
from tests.support.refused import Block, refused, small_mesh

pytestmark = pytest.mark.processes

STEP_FULL_PARAMETERS = {"Adafactor", "Muon"}
NOT_SERVED = {"LBFGS", "SparseAdam"}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_every_optimizer_of_torch_has_a_row_of_the_matrix_or_is_refused_by_name(zero):
    names = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type)} - {"Optimizer"}
    assert names - STEP_FULL_PARAMETERS - NOT_SERVED == {cls.__name__ for cls, _ in CLASSES.values()} | {"Rprop"}
    for name in names & NOT_SERVED:
        with small_mesh(dp=2) as mesh, refused(ModelError, "not-elementwise", name):
            parallelize_model(Block(), mesh, zero=zero).optimizer(getattr(torch.optim, name), lr=0.1)


@pytest.mark.variants(every=10)
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_is_what_the_arithmetic_says(four_processes, zero, axes, mixed):
    for measured, arithmetic in four_processes.run(jobs.memory, zero, axes, mixed):
        assert measured == arithmetic


@pytest.mark.variants(every=22)
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bfloat16_compute_with_float32_weights_and_sums(four_processes, zero, axes):
    for gradients, weights in four_processes.run(jobs.mixed_precision, zero, axes):
        assert gradients < 64 * 2**-8  # matmuls rounded to bfloat16, in the small gradients of norms
        assert weights < 1e-6  # float32 copies lose nothing


def test_a_gradient_that_is_not_a_number_stops_every_rank_by_name(four_processes):
    for message, unchanged in four_processes.run(jobs.nan_gradient):
        assert all(text in message for text in ("nonfinite-gradients", "layers.0.mlp.down_proj.weight", "rank 2"))
        assert unchanged


@pytest.mark.parametrize(("zero", "defer", "times"), [(0, False, 1), (1, False, 1), (2, False, 4), (2, True, 1)])
def test_when_gradients_are_reduced(four_processes, zero, defer, times):
    """Stages 0 and 1 in the last of four backwards, stage 2 in each, or once with `defer`."""
    assert set(four_processes.run(jobs.messages, zero, defer, 4)) == {times}
