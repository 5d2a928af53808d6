"""Shared experts are computed while results of the others return: equal to the unsharded model, and only where that is
right."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from parallelize import ModelError, build_mesh, full_gradients, parallelize_model, parallelize_module
from tests.axes.tensor.experts.test_expert_tensor_parallel import MODES, check
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

PLAN = {"gate": "sequence", "shared_experts.{gate,up}_proj": "colwise", "shared_experts.down_proj": "rowwise"}

BESIDE = {**PLAN, "experts": "experts(beside=shared_experts)"}


def ahead_of(module: nn.Module):
    return module._applied.planned.prefetched


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


def double(module, args):
    """A hook that gives a block another input than the one that it was called with."""
    return (args[0] * 2,)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("changes_input", [False, True], ids=["block's input", "another input"])
@pytest.mark.parametrize("save", [None, "collectives"])
def test_replays_decide_as_their_forward_did(save, changes_input):
    """The first forward is watched, in the stock order; after three misses nothing is computed ahead."""
    model = tiny_model("deepseek_v3", torch.float64)
    ids, labels = tiny_batch()

    def run(rank, **options):
        local = copy.deepcopy(model)
        parallel = parallelize_model(local, build_mesh("cpu", tp=2), ep=2, **options)
        if changes_input:
            block_of(local).register_forward_pre_hook(double)
        results = []
        for _ in range(5):
            local.zero_grad()
            results.append(float(parallel.step(ids, targets=labels)))
            results.append({name: grad.clone() for name, grad in full_gradients(local).items()})
        return results, ahead_of(block_of(local).experts)

    recomputed = {"recompute": "selective", "recompute_save": save} if save else {"recompute": "full"}
    expected = run_ranks(2, lambda rank: run(rank, overlap="off")[0])
    for rank, (results, ahead) in enumerate(run_ranks(2, partial(run, **recomputed))):
        torch.testing.assert_close(results, expected[rank], rtol=1e-12, atol=1e-14)
        assert (ahead.count, ahead.misses) == ((0, 3) if changes_input else (4, 0))


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

    on_ranks(BESIDE, body)


class OtherInput(nn.Module):
    """A block that calls its shared experts with another tensor."""

    def __init__(self, stock: nn.Module):
        super().__init__()
        self.gate, self.experts, self.shared_experts = stock.gate, stock.experts, stock.shared_experts

    def forward(self, x):
        _, weights, choices = self.gate(x)
        routed = self.experts(x.view(-1, x.shape[-1]), choices, weights).view(*x.shape)
        return routed + self.shared_experts(x * 2)


def test_another_input_is_computed_by_the_stock_call_and_no_longer_ahead(caplog):
    stock = OtherInput(block_of(tiny_model("deepseek_v3", torch.float64)))
    x = torch.randn(2, 4, stock.gate.weight.shape[1], dtype=torch.float64)
    expected = stock(x)

    def run(rank):
        block = parallelize_module(copy.deepcopy(stock), build_mesh("cpu", tp=2), BESIDE, ep=2)
        for _ in range(5):  # the first is watched, in the stock order
            torch.testing.assert_close(block(x), expected)
        return ahead_of(block.experts).misses, ahead_of(block.experts).count

    assert run_ranks(2, run) == [(3, 0)] * 2
    assert len([record for record in caplog.records if "no longer computed beside" in record.message]) == 2


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("owner", ["block", "shared"])
@pytest.mark.parametrize("hook", ["backward", "forward"])
def test_hooks_that_replace_inputs(owner, hook):
    def body(block, stock):
        x = torch.randn(
            2, 4, stock.gate.weight.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        block(x)  # watched
        gradients = []
        for model in (stock, block):
            module = model if owner == "block" else model.shared_experts
            if hook == "backward":
                module.register_full_backward_hook(lambda module, grads, grad_outputs: None)
            else:
                module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
            leaf = x.clone().requires_grad_()
            out = model(leaf)
            out.square().sum().backward()
            gradients.append((out.detach(), leaf.grad))
        for actual, expected in zip(gradients[1], gradients[0], strict=True):
            torch.testing.assert_close(actual, expected)

    # the input's gradient is full where every rank has the same tokens
    on_ranks(BESIDE, body)


def test_refusals():
    stock = block_of(tiny_model("deepseek_v3"))

    def run(rank):
        mesh = build_mesh("cpu", tp=2)
        with pytest.raises(ModelError, match=r"not-beside.*has no sharde_experts"):
            plan = {**PLAN, "experts": "experts(beside=sharde_experts)"}
            parallelize_module(copy.deepcopy(stock), mesh, plan, ep=2)
        with pytest.raises(ModelError, match=r"not-beside.*converts the input"):
            plan = {f"mlp.{name}": style for name, style in BESIDE.items()} | {"mlp": "gather(hidden_states)"}
            parallelize_module(nn.ModuleDict({"mlp": copy.deepcopy(stock)}), mesh, plan, ep=2)

    run_ranks(2, run)
