"""Shared experts are computed while results of the others return: equal to the unsharded model, and only where that is right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallelize import ModelError, build_mesh, parallelize_model, parallelize_module
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks
from tests.tensor.test_split_experts import MODES, check

PLAN = {"gate": "sequence", "shared_experts.{gate,up}_proj": "colwise", "shared_experts.down_proj": "rowwise"}


def ahead_of(module: nn.Module):
    return module._applied.planned.ahead


def block_of(model: nn.Module) -> nn.Module:
    return next(layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "shared_experts"))


def on_ranks(plan, body, **options):
    """`body(block, stock)` on two ranks of a planned block of experts."""
    stock = block_of(tiny_model("deepseek_v3", torch.float64))

    def run(rank):
        mesh = build_mesh("cpu", tp=2)
        return body(parallelize_module(copy.deepcopy(stock), mesh, plan, ep=2, **options), copy.deepcopy(stock))

    run_ranks(2, run)


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "dots1"])
def test_shipped_plans(family, mode):
    check(tiny_model(family, torch.float64), {**MODES[mode], "ep": 2, "overlap": "chunked"}, 2, torch.float64)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_each_step_takes_the_output_also_when_it_is_recomputed(kind):
    model = tiny_model("deepseek_v3", torch.float64)
    ids, labels = tiny_batch()

    def run(rank):
        local = copy.deepcopy(model)
        parallel = parallelize_model(local, build_mesh("cpu", tp=2), ep=2, recompute=kind)
        losses = [float(parallel.step(ids, targets=labels)) for _ in range(2)]
        return losses, ahead_of(block_of(local).experts).count

    for losses, count in run_ranks(2, run):
        # the first forward is watched, in the stock order, and a replay ends inside of what is computed ahead
        assert losses[0] == losses[1] and count == 1


def test_what_must_not_be_computed_ahead_is_not():
    def body(block, stock):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 4, stock.gate.weight.shape[1], dtype=torch.float64, generator=generator)
        expected, ahead = stock(x), ahead_of(block.experts)
        copied = copy.deepcopy(block)
        for each in (block, copied, block, copied):
            torch.testing.assert_close(each(x), expected)
        count = ahead.count
        assert count and ahead_of(copied.experts).count == count
        torch.testing.assert_close(block.shared_experts(x), stock.shared_experts(x))
        handle = block.shared_experts.register_forward_pre_hook(lambda module, args: (args[0] * 1,))
        torch.testing.assert_close(block(x), expected)
        handle.remove()
        with torch.inference_mode():
            torch.testing.assert_close(block(x + 0), expected)
        assert ahead.count == count and ahead.input is None and ahead.output is None
        block.experts.register_forward_hook(lambda module, args, output: (x.add_(1), output)[1])
        written = stock.experts(x.flatten(0, 1), *stock.gate(x)[:0:-1]).view_as(x) + stock.shared_experts(x + 1)
        torch.testing.assert_close(block(x), written)
        assert ahead.count == count

    on_ranks({**PLAN, "experts": "experts(beside=shared_experts)"}, body)


class OtherInput(nn.Module):
    """A block that calls its shared experts with another tensor."""

    def __init__(self, stock: nn.Module):
        super().__init__()
        self.gate, self.experts, self.shared_experts = stock.gate, stock.experts, stock.shared_experts

    def forward(self, x):
        _, weights, choices = self.gate(x)
        routed = self.experts(x.view(-1, x.shape[-1]), choices, weights).view(*x.shape)
        return routed + self.shared_experts(x * 2)


def test_refusals():
    stock = block_of(tiny_model("deepseek_v3"))
    beside = {**PLAN, "experts": "experts(beside=shared_experts)"}

    def run(rank):
        mesh = build_mesh("cpu", tp=2)
        block = parallelize_module(OtherInput(copy.deepcopy(stock)), mesh, beside, ep=2)
        x = torch.randn(2, 4, stock.gate.weight.shape[1])
        block(x)  # watched, in the stock order
        with pytest.raises(ModelError, match=r"not-beside.*own input") as of_call:
            block(x)
        with pytest.raises(ModelError, match=r"not-beside.*has no sharde_experts"):
            plan = {**PLAN, "experts": "experts(beside=sharde_experts)"}
            parallelize_module(copy.deepcopy(stock), mesh, plan, ep=2)
        with pytest.raises(ModelError, match=r"not-beside.*converts the input"):
            plan = {f"mlp.{name}": style for name, style in beside.items()} | {"mlp": "gather(hidden_states)"}
            parallelize_module(nn.ModuleDict({"mlp": copy.deepcopy(stock)}), mesh, plan, ep=2)
        return str(of_call.value)

    assert "shared_experts is planned beside" in run_ranks(2, run)[0]
