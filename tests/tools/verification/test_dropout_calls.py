"""Dropout that code calls as a function, at a rate that no config names, is verified: it draws what the unsharded model
draws."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan, verify
from tests.tools.verification.towers import RULES, Tower, tower


class Drops(Tower):
    """Drops in the middle of the pair, whose features are sharded, by a rate of any name and by a number."""

    p, number = 0.3, 2

    def forward(self, x):
        inner = F.dropout(torch.tanh(self.up(self.norm(x))), self.p, self.training)
        return self.head(x + self.down(F.dropout(inner, p=0.4)))


def test_a_model_that_drops_by_function_is_verified():
    assert verify(lambda: tower(cls=Drops), RULES, "tp=2").ok


class Attention(nn.Module):
    """Drops weights of attention inside of one operation."""

    def __init__(self):
        super().__init__()
        self.heads, self.p = 4, 0.3
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


def test_a_plan_of_attention_that_drops_weights():
    derived = derive_plan(Attention(), {"x": torch.randn(2, 3, 12)})
    assert {rule.pattern: rule.style.word for rule in derived.plan.rules}["qkv"] == "colwise"


def test_it_is_still_compared():
    """A wrong plan is found: the row linear's input is not what its weight sums over."""
    wrong = {**RULES, "up": "replicate"}
    with pytest.raises(Exception, match="down"):
        assert verify(lambda: tower(cls=Drops), wrong, "tp=2").ok


def test_a_plan_is_derived():
    derived = derive_plan(Drops(), {"x": torch.randn(2, 3, 12)})
    assert {rule.pattern: rule.style.word for rule in derived.plan.rules}["up"] == "colwise"
