"""The costly decisions: local leaves behind DTensor parameters survive what users do to models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from parallelize import (
    ModelError,
    build_mesh,
    clip_grad_norm_,
    full_gradients,
    local_optimizer,
    parallelize_module,
    shard_info,
)
from parallelize.plan.plan_file import parse_plan
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of, worst
from tests.support.threads import run_ranks

BOTH = {"sequence_parallel": True, "loss_parallel": True}


def pair(family: str = "qwen3", **overrides):
    model = tiny_model(family, torch.float64, **overrides)
    return model, [copy.deepcopy(model) for _ in range(2)]


def step(model: nn.Module, seed: int = 1, length: int = 9) -> torch.Tensor:
    ids, labels = tiny_batch(seed=seed, length=length)
    loss = loss_of(model(input_ids=ids).logits, labels)
    loss.backward()
    return loss.detach()


def grads(model: nn.Module) -> dict:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_finished_dtensors_right_after_backward():
    model, models = pair(num_key_value_heads=1)
    step(model)

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), **BOTH)
        step(models[rank])
        for name, parameter in models[rank].named_parameters():
            assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == parameter.placements, name
        return full_gradients(models[rank])

    for actual in run_ranks(2, body):
        assert worst(actual, grads(model))[0] < 1e-12


def test_a_failed_backward_leaves_nothing_behind():
    model, models = pair()
    step(model, 2)

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), **BOTH)
        ids, labels = tiny_batch()
        embeds = models[rank].model.embed_tokens(ids).detach().requires_grad_()
        embeds.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(models[rank](inputs_embeds=embeds).logits, labels).backward()
        models[rank].zero_grad()
        step(models[rank], 2)
        return full_gradients(models[rank])

    for actual in run_ranks(2, body):
        assert worst(actual, grads(model))[0] < 1e-12


def test_recompute_with_two_lengths_alive():
    """Forwards of 8 and of 12 tokens, then both backwards: recompute knows which is which. 7 and 8 would not:
    refused."""
    model, models = pair()

    def two(net, lengths):
        losses = []
        for seed, length in enumerate(lengths):
            ids, labels = tiny_batch(seed=seed, length=length)
            losses.append(loss_of(net(input_ids=ids).logits, labels))
        for loss in losses:
            loss.backward()

    two(model, (8, 12))

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), **BOTH)
        models[rank].gradient_checkpointing_enable({"use_reentrant": False})
        two(models[rank], (8, 12))
        gradients = full_gradients(models[rank])
        with pytest.raises(ModelError) as error:
            two(models[rank], (7, 8))
        assert error.value.slugs == ("ambiguous-sequence",)
        return gradients

    for actual in run_ranks(2, body):
        assert worst(actual, grads(model))[0] < 1e-12


def test_a_copy_is_independent():
    model, models = pair()
    step(model)

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), **BOTH)
        step(models[rank], 3)
        twin = copy.deepcopy(models[rank])
        with torch.no_grad():
            for parameter in models[rank].parameters():
                parameter.zero_()
        twin.zero_grad()
        step(twin)
        return full_gradients(twin)

    for actual in run_ranks(2, body):
        assert worst(actual, grads(model))[0] < 1e-12


def test_hooks_flags_buffers_and_attributes_are_kept():
    _, models = pair()

    def body(rank):
        net = models[rank]
        calls = []
        net.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *a: calls.append("q"))
        net.model.norm.register_forward_pre_hook(lambda *a: calls.append("norm"))
        net.model.layers[1].eval()
        net.lm_head.weight.tag = "kept"
        modes = [m.training for m in net.modules()]
        buffers = {n: b.clone() for n, b in net.named_buffers()}
        parallelize_module(net, build_mesh("cpu", tp=2), **BOTH)
        step(net)
        assert calls == ["q", "norm"] and modes == [m.training for m in net.modules()]
        assert net.lm_head.weight.tag == "kept"
        assert all(torch.equal(b, buffers[n]) for n, b in net.named_buffers())

    run_ranks(2, body)


def test_optimizers_that_mix_elements_are_refused():
    with pytest.raises(ModelError) as error:
        local_optimizer(torch.optim.LBFGS([nn.Parameter(torch.zeros(2))]))
    assert error.value.slugs == ("not-elementwise",)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_clipping_counts_every_element_once(family, norm_type):
    model, models = pair(family, num_key_value_heads=1)
    step(model)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), **BOTH)
        step(models[rank])
        plain = nn.Parameter(torch.ones(2, dtype=torch.float64))  # a plain one with no gradient may be among them
        norm = clip_grad_norm_([*models[rank].parameters(), plain], 0.5, norm_type)
        again = clip_grad_norm_(models[rank], 1e9, norm_type)
        return norm, again, full_gradients(models[rank])

    for norm, again, actual in run_ranks(2, body):
        assert abs(norm - expected) < 1e-12 * expected
        assert abs(again - min(expected, 0.5)) < 1e-5
        assert worst(actual, grads(model))[0] < 1e-12


def test_clipping_refuses_what_is_not_finite():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    with pytest.raises(RuntimeError, match="nan"):
        clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


class Odd(nn.Module):
    """Nobody planned for this: a reused block, keyword-only inputs, tuples, nested lists, an int buffer, bare
    parameters."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(6, 10)
        self.down = nn.ModuleList([nn.ModuleList([nn.Linear(10, 6)])])
        self.twice = nn.ModuleList([self.shared, self.shared])
        self.scale = nn.Parameter(torch.rand(10) + 0.5)
        self.whole = nn.Parameter(torch.rand(6) + 0.5)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, *, x: torch.Tensor, flags: dict | None = None) -> tuple:
        hidden = x
        for block in self.twice:
            inner = torch.tanh(block(hidden)) * self.scale
            hidden = hidden + self.down[0][0](inner)
        return hidden * self.whole + self.table.to(x), {"inner": inner.sum(0)}, [self.steps]


ODD = """
schema_version: 1
tensor_parallel:
  shared: colwise
  down.*.*: rowwise
  scale: shard
  whole: replicate
"""


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_model_nobody_planned_for(tp):
    model = Odd().double()
    models = [copy.deepcopy(model) for _ in range(tp)]
    x = torch.randn(5, 6, dtype=torch.float64)
    want_x = x.clone().requires_grad_()
    expected = model(x=want_x)
    expected[0].square().sum().backward()

    def body(rank):
        net = models[rank]
        parallelize_module(net, build_mesh("cpu", tp=tp), parse_plan(ODD))
        planned_x = x.clone().requires_grad_()
        out = net(x=planned_x, flags={})
        out[0].square().sum().backward()
        assert net.twice[0] is net.shared and out[2][0] == 3
        return out[0].detach(), planned_x.grad, full_gradients(net), shard_info(net)["scale"].slices(rank)

    for out, grad, actual, _ in run_ranks(tp, body):
        assert worst({"": out}, {"": expected[0].detach()})[0] < 1e-12
        assert worst({"": grad}, {"": want_x.grad})[0] < 1e-12
        assert worst(actual, grads(model))[0] < 1e-12


def test_checkpoint_of_a_plain_block():
    model = Odd().double()
    models = [copy.deepcopy(model) for _ in range(2)]
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    model(x=x)[0].sum().backward()

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), parse_plan(ODD))
        checkpoint(lambda y: models[rank](x=y)[0], x.detach().requires_grad_(), use_reentrant=False).sum().backward()
        return full_gradients(models[rank])

    for actual in run_ranks(2, body):
        assert worst(actual, grads(model))[0] < 1e-12


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_hooks_of_a_tied_parameter_see_the_sum_over_its_uses(sequence_parallel):
    stock = tiny_model("llama", torch.float64, tie_word_embeddings=True)
    ids, labels = tiny_batch(length=8)

    def clamped(model: Any) -> tuple[torch.Tensor, int]:
        calls: list[int] = []
        model.lm_head.weight.register_hook(lambda grad: (calls.append(1), grad.clamp(-1e-3, 1e-3))[1])
        model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(1))
        loss_of(model(input_ids=ids).logits, labels).backward()
        return full_gradients(model)["model.embed_tokens.weight"], len(calls)

    def body(rank: int) -> tuple[torch.Tensor, int]:
        mesh = build_mesh("cpu", tp=2)
        model = copy.deepcopy(stock)
        return clamped(parallelize_module(model, mesh, sequence_parallel=sequence_parallel, loss_parallel=False))

    stock_copy = copy.deepcopy(stock)
    stock_copy.lm_head.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    loss_of(stock_copy(input_ids=ids).logits, labels).backward()
    expected = stock_copy.lm_head.weight.grad
    for actual, calls in run_ranks(2, body):
        assert calls == 2
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)
