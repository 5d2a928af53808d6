"""Factors that are sharded together, because a linear reads their concatenation; and those that exclude others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import MeshSpec, derive_plan
from parallelize.plan.model_facts import describe
from parallelize.plan.resolve import resolve

WIDTH, HEADS, HEAD, INNER = 24, 4, 5, 36
TOKENS = (torch.randn(2, 7, WIDTH),)


def rules_of(model, inputs=TOKENS):
    derived = derive_plan(model, inputs)
    assert derived.proof.ok and derived.proof.error < 1e-12
    resolved = resolve(derived.plan, describe(derived.model), MeshSpec(tp=2))
    return {name: str(row.rule.style) for name, row in resolved.modules.items()}, derived


def attended(q, k, v):
    heads = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class SideBySide(nn.Module):
    """Attention and an MLP of one input, whose results one linear reads."""

    def __init__(self, gated: bool = False):
        super().__init__()
        self.gated = gated
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD) for _ in range(3))
        self.up = nn.Linear(WIDTH, 2 * INNER if gated else INNER)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(HEADS * HEAD + INNER, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        up, mixed = F.gelu(self.up(y)), attended(self.q(y), self.k(y), self.v(y))
        if self.gated:
            up, gate = up.chunk(2, dim=-1)
            up = up * gate
        return x + self.out(torch.cat([mixed, up], dim=-1))


@pytest.mark.parametrize("gated", [False, True])
def test_a_linear_over_heads_and_features(gated):
    rules, derived = rules_of(nn.Sequential(SideBySide(gated), SideBySide(gated)))
    assert rules["1.out"] == f"rowwise(heads*{HEAD} + rest)" and rules["1.q"] == rules["1.v"] == "colwise(heads)"
    assert rules["1.up"] == ("colwise(chunks=2)" if gated else "colwise") and derived.whole == {}


class BesideANorm(SideBySide):
    """The features of the MLP are needed in full, so that the heads stay whole too."""

    def forward(self, x):
        y = self.norm(x)
        mixed = attended(self.q(y), self.k(y), self.v(y))
        return x + self.out(torch.cat([mixed, self.up(y).softmax(-1)], dim=-1))


def test_both_or_none():
    rules, derived = rules_of(nn.Sequential(BesideANorm(), BesideANorm()))
    assert set(rules.values()) <= {"colwise(output=full)", "replicate"}  # in no pair
    assert "beside other features that are not sharded" in derived.text


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD) for _ in range(3))
        self.out = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x, text):
        return x + self.out(attended(self.q(x), self.k(text), self.v(text)))


class WithText(nn.Module):
    """The features of the text, which `embed` makes and all keys and values read, would leave queries whole."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Linear(9, WIDTH), nn.ModuleList(CrossAttention() for _ in range(2))

    def forward(self, x, text):
        text = F.gelu(self.embed(text))
        for block in self.blocks:
            x = block(x, text)
        return x


def test_heads_of_each_layer_come_before_a_text_that_all_layers_read():
    rules, derived = rules_of(WithText(), (*TOKENS, torch.randn(2, 3, 9)))
    assert rules["blocks.1.q"] == "colwise(heads)" and rules["blocks.1.out"] == "rowwise(heads)"
    assert set(derived.whole) == {"embed"}


class Modulated(nn.Module):
    """An MLP whose input is scaled by what a linear makes of a vector for each sample, and a residual that is not in a
    pair."""

    def __init__(self):
        super().__init__()
        self.scale, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 60), nn.Linear(60, WIDTH)

    def forward(self, x, time):
        x = x + self.other(self.norm(x)).softmax(-1)
        return x + self.down(F.gelu(self.up(self.norm(x) * self.scale(time).unsqueeze(1))))


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Modulated()])

    def forward(self, x, time):
        for block in self.blocks:
            x = block(x, time)
        return x


def test_linears_of_one_vector_a_sample_are_gathered_where_pairs_shard_enough():
    rules, derived = rules_of(Timed(), (*TOKENS, torch.randn(2, WIDTH)))
    assert rules["blocks.0.scale"] == "colwise(output=full)" and rules["blocks.0.down"] == "rowwise"
    assert set(derived.whole) == {"blocks.0.other"}  # of every token
