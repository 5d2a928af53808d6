"""Packed rows in steps, evaluations and forwards mean what they mean to the stock model without a cache, on every
mesh."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import build_mesh, parallelize_model
from tests.support.context import alone, batch_of, error_of, family, on_mesh
from tests.support.threads import run_ranks

ROWS = 4
IDS, TARGETS = batch_of(10, ROWS)
POSITIONS = torch.arange(10).remainder(4).repeat(ROWS, 1)
EACH_ALONE = torch.cat(
    [torch.arange(10), torch.arange(5).repeat(2), torch.arange(10).remainder(3)] + [torch.arange(10)]
)
BY_ROW = EACH_ALONE.view(ROWS, 10)
MESHES = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"dp": 2, "pp": 2}]
MESHES += [{"cp": 2, "tp": 2}, {"dp": 2, "cp": 2}, {"pp": 2, "tp": 2}]
# of the second the class itself takes no use_cache, and passes it on
MODELS = ["llama", "granitemoe"]


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("positions", [POSITIONS[:1], POSITIONS, BY_ROW], ids=["one for all", "alike", "by row"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(axes))
def test_a_step_on_packed_rows_is_that_of_the_stock_model(axes, name, positions):
    model = family(name)
    expected = alone(model, IDS, TARGETS, position_ids=positions)
    ranks = torch.tensor(list(axes.values())).prod().item()

    def body(rank):
        return on_mesh(model, axes, IDS, TARGETS, {"position_ids": positions}, num_microbatches=2)

    for results in run_ranks(ranks, body):
        error, where = error_of(results, expected)
        assert error < 1e-12, where


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}], ids=lambda axes: "x".join(axes))
def test_evaluations_and_forwards_keep_documents_apart_too(axes):
    model = family("llama")
    inputs = {"input_ids": IDS, "position_ids": POSITIONS}
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
        mixed = model(**inputs, use_cache=True).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
    assert (logits - mixed).abs().max() > 1e-2  # beside a cache the stock model does not look for documents

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model).eval(), build_mesh("cpu", **axes))
        rows = slice(2 * rank, 2 * rank + 2) if "dp" in axes else slice(None)
        batch = {key: value[rows] for key, value in inputs.items()}
        loss = parallel.evaluate(**batch, targets=TARGETS[rows])
        return loss, rows, [out.logits for out in parallel.forward(**batch)]

    for loss, rows, outputs in run_ranks(2, body):
        assert torch.allclose(loss, wanted, rtol=1e-12)
        if "cp" not in axes:  # there each rank has the logits of its tokens
            assert not outputs or torch.allclose(torch.cat(outputs), logits[rows], rtol=1e-10)


def test_a_cache_that_is_asked_for_is_made():
    model = family("llama")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model).eval(), build_mesh("cpu", tp=2))
        named = [parallel.forward(input_ids=IDS, **asked)[0] for asked in ({}, {"use_cache": True})]
        return [out.past_key_values is not None for out in named]

    assert run_ranks(2, body)[0] == [False, True]
