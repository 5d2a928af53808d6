"""Steps make no cache unless one is asked for, and pass no mask without padding: beside either the stock model does not
keep packed documents apart."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import build_mesh, parallelize_model
from parallelize.axes.batch.input_batch import BatchForm
from tests.support.context import alone, batch_of, error_of, family, on_mesh
from tests.support.threads import run_ranks

ROWS = 4
IDS, TARGETS = batch_of(10, ROWS)
POSITIONS = torch.arange(10).remainder(4).repeat(ROWS, 1)
MESHES = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}]


@pytest.mark.variants(every=1)
@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(axes))
def test_a_step_of_a_class_that_passes_use_cache_on(axes):
    """Its own forward does not name the argument."""
    model = family("granitemoe")
    expected = alone(model, IDS, TARGETS, position_ids=POSITIONS)

    def body(rank):
        return on_mesh(model, axes, IDS, TARGETS, {"position_ids": POSITIONS}, num_microbatches=2)

    for results in run_ranks(2, body):
        error, where = error_of(results, expected)
        assert error < 1e-12, where


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(axes))
def test_a_mask_without_padding_does_not_join_documents(axes):
    """As collators make it for any batch."""
    model = family("llama")
    expected = alone(model, IDS, TARGETS, position_ids=POSITIONS)
    inputs = {"position_ids": POSITIONS, "attention_mask": torch.ones_like(POSITIONS)}

    def body(rank):
        return on_mesh(model, axes, IDS, TARGETS, inputs, num_microbatches=2)

    for results in run_ranks(2, body):
        error, where = error_of(results, expected)
        assert error < 1e-12, where


def test_masks_that_say_something_stay():
    """Padding on one data rank; positions of one document; none at all."""
    model = family("llama")
    form = BatchForm(model)
    ones, padded = torch.ones_like(POSITIONS), (torch.arange(10) > 2).expand(ROWS, -1)
    one_document = torch.arange(10).expand(ROWS, -1)
    gaps = one_document + 100 * (one_document >= 3)  # a document whose positions go on further away
    for mask, positions in ((padded, POSITIONS), (ones, one_document), (ones, gaps), (ones, None)):
        batch = form.step_batch((), {"input_ids": IDS, "attention_mask": mask, "position_ids": positions})
        assert batch.mask is mask
    assert form.step_batch((), {"attention_mask": ones, "position_ids": POSITIONS}).mask is None

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", dp=2))
        mask = ones if rank else padded
        return parallel.step(input_ids=IDS, attention_mask=mask, position_ids=POSITIONS, targets=TARGETS).isfinite()

    assert all(run_ranks(2, body))


def test_a_cache_that_is_asked_for_is_made():
    model = family("llama")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model).eval(), build_mesh("cpu", tp=2))
        named = [parallel.forward(input_ids=IDS, **asked)[0] for asked in ({}, {"use_cache": True})]
        return [out.past_key_values is not None for out in named]

    assert run_ranks(2, body)[0] == [False, True]
