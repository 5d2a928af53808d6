"""Losses, positions, masks, arguments, autocast and recompute over cp are those of the stock model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallelize import build_mesh, gather_sequence, parallelize_model, recompute, verify
from parallelize.axes.context.forward_state import context_of
from parallelize.plan.plan_file import parse_plan
from tests.axes.context.two_ranks import IDS, WithStockAttention, outputs, over_cp
from tests.support.context import batch_of, family
from tests.support.parity import worst
from tests.support.threads import run_ranks


@pytest.mark.parametrize("arguments", [{"num_items_in_batch": 100}, {"shift_labels": (IDS * 5) % 67}])
def test_loss_arguments_of_the_caller_apply(arguments):
    model = family("llama")
    expected = model(input_ids=IDS, labels=IDS, **arguments).loss.detach()

    def body(rank):
        return over_cp(model)(input_ids=IDS, labels=IDS, **arguments).loss.detach()

    assert torch.allclose(sum(run_ranks(2, body)), expected, rtol=1e-6)


RESTARTING = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("name", ["llama", "mistral", "opt", "bert", "gpt2"])
@pytest.mark.parametrize("mask", ["none", "all", "left"])
def test_positions_and_masks_mean_what_they_mean_to_the_stock_model(name, mask):
    """Documents are looked for only where the model looks for them; a model may count positions by its mask."""
    inputs = {"input_ids": IDS}
    if mask != "left":
        inputs["position_ids"] = RESTARTING
    if mask != "none":
        inputs["attention_mask"] = torch.ones_like(IDS)
    if mask == "left":
        inputs["attention_mask"][0, :2] = 0
    actual, expected = outputs(family(name).eval(), **inputs)
    real = inputs["attention_mask"].bool() if mask == "left" else torch.ones_like(IDS).bool()
    assert (actual - expected)[real].abs().max() <= 1e-12 * expected[real].abs().max()


def test_verify_pads_in_front_over_cp():
    assert verify("opt", mesh="cp=2").ok


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = WithStockAttention(None)

    def forward(self, x, *extra, places=None):
        for term in extra:
            x = x + term
        return self.block(x) + places.unsqueeze(-1)


def test_arguments_keep_their_positions():
    text = """
schema_version: 1
tensor_parallel: {block.q: replicate}
attention: {block: causal}
positions: places
"""
    model = Own().double()
    x, first, second = torch.randn(3, 2, 6, 8, dtype=torch.float64)
    expected = model(x, first, second, places=torch.arange(6).unsqueeze(0))

    def body(rank):
        over_ranks = over_cp(model, plan=parse_plan(text))
        with pytest.raises(TypeError):
            over_ranks(x, nothing=1)
        return gather_sequence(over_ranks, over_ranks(x, first, second))

    assert torch.allclose(run_ranks(2, body)[0], expected, rtol=1e-12)


def test_every_stage_has_checked_its_inputs_after_a_step():
    model = family("llama")

    def body(rank):
        mesh = build_mesh("cpu", pp=2, cp=2)
        parallel = parallelize_model(copy.deepcopy(model), mesh, num_microbatches=2)
        ids, targets = batch_of(9, 2)
        parallel.step(input_ids=ids, targets=targets)
        return context_of(parallel.module).checked

    assert run_ranks(4, body) == [True] * 4


def test_autocast_is_that_of_the_stock_model():
    model = family("llama", torch.float32)
    kinds = []
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(input_ids=IDS).logits
    exact = model.double()(input_ids=IDS).logits
    model.float()

    def body(rank):
        from parallelize.axes.context import stock_attention as attend

        real = attend.ring_attention
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                attend,
                "ring_attention",
                lambda q, k, v, *rest: kinds.append({q.dtype, k.dtype, v.dtype}) or real(q, k, v, *rest),
            )
            over_ranks = over_cp(model)
            with torch.autocast("cpu", torch.bfloat16):
                return gather_sequence(over_ranks, over_ranks(input_ids=IDS).logits)

    actual = run_ranks(2, body)[0]
    assert all(kind == {torch.bfloat16} for kind in kinds)
    assert (actual - exact).abs().mean() <= 2 * (expected - exact).abs().mean()


@pytest.mark.parametrize("ulysses", [1, 2])
def test_a_recomputed_window_is_that_of_its_own_forward(ulysses):
    """A later, shorter forward, which the window covers whole, must not take it from the one that is recomputed."""
    model = family("mistral", sliding_window=7)
    long, short = torch.arange(3, 27).view(1, 24), IDS
    reference = copy.deepcopy(model)
    (reference(input_ids=long).logits.sum() + reference(input_ids=short).logits.sum()).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}

    def body(rank):
        over_ranks = recompute(over_cp(model, ulysses=ulysses), "full", units="model.layers.*")
        first, second = over_ranks(input_ids=long).logits.sum(), over_ranks(input_ids=short).logits.sum()
        (first + second).backward()
        return {name: p.grad for name, p in over_ranks.named_parameters()}

    parts = run_ranks(2, body)
    assert worst({name: sum(part[name] for part in parts) for name in expected}, expected)[0] <= 1e-12
