"""Hooks, functional calls and scalar parameters get their gradients in planned models."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from parallelize import ModelError, build_mesh, cross_entropy, full_gradients, parallelize_module
from tests.axes.tensor.planned_pairs import planned
from tests.axes.tensor.test_hot_path import grads, pair, step
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks


def test_hooks_on_parameters_fire_with_dtensor_gradients():
    _, models = pair()

    def body(rank):
        net = planned(models, rank)
        calls = []
        net.model.norm.weight.register_hook(lambda grad: grad * 0)
        net.model.norm.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
        step(net)
        assert calls == [True] and net.model.norm.weight.grad.to_local().abs().max() == 0

    run_ranks(2, body)
    model = tiny_model("llama")
    model.model.norm.weight.register_hook(lambda grad: grad)
    with pytest.raises(ModelError) as error:
        run_ranks(1, lambda rank: parallelize_module(model, build_mesh("cpu", tp=1)))
    assert error.value.slugs == ("hook-on-parameter",)


def test_functional_call_differentiates_through():
    model, models = pair()
    ids, labels = tiny_batch()

    def losses(net):
        scaled = {n: p * 1.5 for n, p in net.named_parameters()}
        logits = torch.func.functional_call(net, scaled, kwargs={"input_ids": ids}).logits
        if hasattr(logits, "vocabulary"):
            return cross_entropy(logits, labels)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    losses(model).backward()

    def body(rank):
        net = planned(models, rank)
        losses(net).backward()
        return full_gradients(net)

    for actual in run_ranks(2, body):
        assert worst(actual, grads(model))[0] < 1e-12


def test_a_second_derivative_is_refused():
    _, models = pair()

    def body(rank):
        net = planned(models, rank, sequence_parallel=False, loss_parallel=False)
        embeds = torch.randn(2, 5, 48, dtype=torch.float64, requires_grad=True)
        out = net(inputs_embeds=embeds).logits.square().sum()
        for differentiate in (partial(torch.autograd.grad, out, embeds), out.backward):
            with pytest.raises(ModelError) as error:
                differentiate(create_graph=True, retain_graph=True)
            assert error.value.slugs == ("double-backward",)

    run_ranks(2, body)


def test_a_learned_logit_scale_gets_its_full_gradient():
    model, models = pair("llama")
    ids, labels = tiny_batch()

    def run(net):
        scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        cross_entropy(net(input_ids=ids).logits * scale, labels).backward()
        return scale.grad

    expected = run(model)
    for actual in run_ranks(2, lambda rank: run(planned(models, rank))):
        assert abs(actual - expected) < 1e-12


def _loss_of(net, ids, labels):
    return cross_entropy(net(input_ids=ids).logits, labels)


GRADIENT_INPUTS = {
    "backward": lambda loss, parameters: loss.backward(inputs=parameters),
    "backward of several": lambda loss, parameters: torch.autograd.backward([loss], inputs=parameters),
    "grad": lambda loss, parameters: torch.autograd.grad(loss, parameters, allow_unused=True),
}


@pytest.mark.parametrize("name", GRADIENT_INPUTS)
def test_gradients_with_respect_to_planned_parameters_are_refused(name):
    _, models = pair()
    ids, labels = tiny_batch()

    def body(rank):
        net = planned(models, rank)
        loss = _loss_of(net, ids, labels)
        with pytest.raises(ModelError) as error:
            GRADIENT_INPUTS[name](loss, [net.model.norm.weight])
        return error.value.slugs

    assert run_ranks(2, body) == [("gradient-inputs",)] * 2


def test_gradients_with_respect_to_other_tensors_are_right():
    model, models = pair()
    ids, labels = tiny_batch()
    table = model.get_input_embeddings().weight.detach()

    def gradients(net, loss_of):
        scale = torch.ones((), dtype=table.dtype, requires_grad=True)
        loss = loss_of(net(inputs_embeds=table[ids] * scale).logits)
        (first,) = torch.autograd.grad(loss, scale, retain_graph=True)
        loss.backward(inputs=[scale])
        return torch.stack((first, scale.grad))

    expected = gradients(model, lambda logits: F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    for actual in run_ranks(2, lambda rank: gradients(planned(models, rank), lambda z: cross_entropy(z, labels))):
        assert torch.allclose(actual, expected, rtol=1e-12)
