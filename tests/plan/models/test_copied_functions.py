"""A copy of a model computes with its own weights, also where a function of an attribute runs modules (minGPT's
MLP)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize import derive_plan, verify
from parallelize.plan.models.model_source import copy_of
from parallelize.plan.models.tiny_copy import meta_copy

WIDTH = 6


def _by_closure(self):
    m = self.mlp
    return lambda x: m.down(m.act(m.up(x)))


def _by_itself(self):
    return lambda x: self.mlp.down(self.mlp.act(self.mlp.up(x)))


def _by_default(self):
    return lambda x, m=self.mlp: m.down(m.act(m.up(x)))


def _by_keyword(self):
    def run(x, *, m=self.mlp):
        return m.down(m.act(m.up(x)))

    return run


def _by_list(self):
    layers = [self.mlp.up, self.mlp.act, self.mlp.down]

    def run(x):
        for layer in layers:
            x = layer(x)
        return x

    return run


def _by_another_function(self):
    m = self.mlp
    inner = lambda x: m.act(m.up(x))  # noqa: E731
    return lambda x: m.down(inner(x))


def _by_weights(self):
    up, down = self.mlp.up.weight, self.mlp.down.weight
    return lambda x: torch.tanh(x @ up.t()) @ down.t()


WAYS = (_by_closure, _by_itself, _by_default, _by_keyword, _by_list, _by_another_function, _by_weights)


class Block(nn.Module):
    """As minGPT's: the MLP is a function over modules of a dict."""

    def __init__(self, way=_by_closure):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 10), "down": nn.Linear(10, WIDTH), "act": nn.Tanh()})
        self.functions = {"mlp": way(self)}

    def forward(self, x):
        return x + self.functions["mlp"](self.norm(x))


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_computes_with_its_own_weights(way):
    model, x = Block(way), torch.randn(2, 3, WIDTH)
    before = model(x)
    copied = copy_of(model)
    assert torch.equal(copied(x), before)
    with torch.no_grad():
        copied.mlp["down"].weight.zero_()
        copied.mlp["down"].bias.zero_()
    assert torch.allclose(copied(x), x) and torch.equal(model(x), before)
    assert meta_copy(model)(x.to("meta")).is_meta


def test_functions_that_run_no_module_are_the_same():
    model = Block()
    scale = 3
    model.plain, model.scaled = torch.tanh, lambda x: scale * x
    copied = copy_of(model)
    assert copied.plain is torch.tanh and copied.scaled is model.scaled


def test_a_function_keeps_its_name_and_attributes():
    model = Block()
    run = model.functions["mlp"]
    run.__doc__, run.cost = "The MLP.", 7
    own = copy_of(model).functions["mlp"]
    assert own is not run and (own.__qualname__, own.__doc__, own.cost) == (run.__qualname__, "The MLP.", 7)


def test_a_plan_is_derived_and_verified():
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Block(), Block()), {"input": torch.randn(2, 3, WIDTH)}
    derived = derive_plan(model, inputs)
    words = {rule.pattern: rule.style.word for rule in derived.plan.rules}
    assert (words["*.mlp.up"], words["*.mlp.down"]) == ("colwise", "rowwise") and derived.proof is not None
    targets = torch.randint(0, WIDTH, (2, 3))
    source = {"inputs": lambda *_: {**inputs, "targets": targets}, "loss": lambda out, _: out.square().sum()}
    assert verify(lambda: {"model": model, **source}, derived.plan, "tp=2", full_size=True).ok
