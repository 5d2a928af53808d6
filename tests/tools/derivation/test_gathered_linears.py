"""Linears that no pair takes: sharded by themselves, with their output gathered, where pairs shard little of the
layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan
from parallelize.plan.dims.factor_analysis import FactorAnalysis
from parallelize.plan.dims.trace import record_forward
from parallelize.tools.derivation.gathered_linears import gathered_linears, is_sharded, layer_share, without_alike
from tests.tools.derivation.own_models import Mlp

WIDTH = 9
"""Which two ranks do not divide."""


class StandardizedConv(nn.Conv2d):
    """Its own forward, as of BiT: weights of each channel with mean 0 and variance 1."""

    def forward(self, x):
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


class Residual(nn.Module):
    """One convolution between additions, of which input and output are the same channels, and two with a softmax
    between them."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
        self.standardized, self.back = StandardizedConv(WIDTH, WIDTH + 2, 1), nn.Conv2d(WIDTH + 2, WIDTH, 1)

    def forward(self, x):
        x = x + self.norm(self.conv(x)).relu()
        return x + self.back(self.standardized(x).softmax(1))


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.blocks = nn.Conv2d(3, WIDTH, 3), nn.ModuleList([Residual() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, image):
        x = self.enter(image)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def test_convolutions_of_which_each_is_alone():
    derived = derive_plan(Convolutional(), {"image": torch.randn(2, 3, 8, 6)})
    rules = {rule.pattern: str(rule.style) for rule in derived.plan.rules}
    names = [f"blocks.*.{name}" for name in ("conv", "standardized", "back")]
    assert {rules[name] for name in names} == {"colwise(output=full)"} and derived.proof.ok
    assert "# gathered: blocks.*.standardized: softmax in blocks.*" in derived.text
    assert set(derived.whole) == {"enter", "head"}  # which are in no layer


class Closing(nn.Module):
    """A linear that takes a softmax of what it computes."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.up(x).softmax(-1)


class OwnSoftmax(nn.Linear):
    def forward(self, x):
        return super().forward(x).softmax(-1)


class Layer(nn.Module):
    """Of its linears `closing.up` alone can be gathered: others are never called, read elsewhere, also in a branch that
    is not taken, tied, narrow or need all they return."""

    def __init__(self):
        super().__init__()
        self.closing, self.own, self.unused = Closing(), OwnSoftmax(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.read, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.tied, self.twin = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.twin.weight, self.seldom = self.tied.weight, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.closing(x) + self.own(x) + self.read(x) + x @ self.read.weight + self.narrow(x).mean(-1, keepdim=True)
        x = self.seldom(x).softmax(-1) if x.ndim == 3 else self.seldom.weight
        return self.twin(self.tied(x).softmax(-1)).softmax(-1)


def test_what_is_not_gathered():
    layers = nn.Sequential(Layer())
    analysis = FactorAnalysis(record_forward(layers, (torch.randn(2, 4, WIDTH),)), layers)
    assert set(gathered_linears(analysis, layers, {})) == {"0.closing.up"}
    assert gathered_linears(analysis, layers, {"0.closing": "experts"}) == {}  # whose style computes with it
    assert gathered_linears(analysis, layers, {}, partial={"0.closing.up.weight"}) == {}


def test_pairs_that_shard_enough_are_left_alone():
    """`other` is a third of the layers."""

    class Three(Mlp):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.other, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x):
            return self.norm(self.other(x)) + super().forward(x)

    derived = derive_plan(nn.Sequential(Three(), Three()), (torch.randn(2, 4, WIDTH),))
    assert "gathered" not in derived.text and set(derived.whole) == {"0.other", "1.other"}


def test_what_a_proof_names_is_left_whole_in_every_layer():
    gathered = dict.fromkeys(["layers.0.a", "layers.1.a", "layers.1.attn.q", "layers.0.ab"], "")
    assert set(without_alike(gathered, "layers.1.a")) == {"layers.1.attn.q", "layers.0.ab"}
    assert set(without_alike(gathered, "layers.0.attn")) == {"layers.0.a", "layers.1.a", "layers.0.ab"}
    assert without_alike(gathered, "") == gathered


def test_the_share_of_the_layers():
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)]), "head": nn.Linear(4, 9)}
    )
    assert layer_share(model, {"layers.0": "colwise", "head": "colwise"}) == pytest.approx(20 / 36)
    assert layer_share(
        model, {"layers.0": "replicate(gradient=partial)", "layers.1.weight": "shard(0)"}
    ) == pytest.approx(16 / 36)
    assert layer_share(model["head"], {"": "colwise"}) == 1 and not is_sharded("a.weight", {"a": "sequence"})
