"""Packed rows over cp are those of the stock model, for every shipped plan: it may keep documents apart, in some
layers, or not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from parallelize import build_mesh, context_parallel, gather_sequence
from parallelize.plan.choose import plan_of
from parallelize.plan.models.signature_inputs import cache_off
from tests.support.context import family, softmax_in_float64
from tests.support.models import FAMILIES, MIXTURES, SHIPPED, choose_unevenly, keep_float64, perturb, shipped_source
from tests.support.threads import run_ranks

LENGTH = 12
IDS = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(LENGTH).remainder(5).repeat(2, 1)
FAMILY_NAMES = sorted(FAMILIES | MIXTURES)
IN_FLOAT32 = ("gemma3n",)  # whose norms the tests do not compute in float64
OTHERS = sorted(set(SHIPPED) - {"rwkv"})  # which knows no positions, and compiles a kernel


def shipped(name: str) -> Any:
    torch.manual_seed(0)
    model = shipped_source(name).build("cpu")
    perturb(model)
    choose_unevenly(model)
    model.double()
    if name not in IN_FLOAT32:
        keep_float64(model)
    return model


def outputs_of(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, **cache_off(model)).logits


@pytest.mark.variants(every=12)
@pytest.mark.parametrize("name", FAMILY_NAMES + OTHERS)
def test_documents_are_apart_where_the_stock_model_keeps_them_apart(name):
    model = (family(name) if name in FAMILY_NAMES else shipped(name)).eval()
    plan = plan_of(model, None)
    if not plan.attention or plan.positions == "none":
        pytest.skip("no positions, or never over cp")
    inputs = {"input_ids": IDS, plan.positions: POSITIONS}
    with softmax_in_float64():  # around all ranks: threads that replace and restore it by turns leave it replaced
        compare_with_stock(model, name, inputs)


def compare_with_stock(model, name, inputs):
    expected = outputs_of(model, **inputs)

    def body(rank):
        over_ranks = context_parallel(copy.deepcopy(model), build_mesh("cpu", cp=2))
        return gather_sequence(over_ranks, outputs_of(over_ranks, **inputs))

    actual = run_ranks(2, body)[0]
    tolerance = 1e-5 if name in IN_FLOAT32 else 1e-9
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()
