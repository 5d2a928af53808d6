"""Dropout that code calls as a function, whatever its rate is called, is turned off: on shards it would draw other numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan, recompute, verify
from parallelize.tools.verification.precision import computing_in, widen_recompute
from tests.tools.verification.towers import RULES, Tower, tower


class Drops(Tower):
    """Drops in the middle of the pair, whose features are sharded, by a rate of any name and by a number."""

    p, number = 0.3, 2

    def forward(self, x):
        inner = F.dropout(torch.tanh(self.up(self.norm(x))), self.p, self.training)
        return self.head(x + self.down(F.dropout(inner, p=0.4)))


@pytest.mark.parametrize("options", [{}, pytest.param({"recompute": "full"}, marks=pytest.mark.sweep)], ids=str)
def test_a_model_that_drops_by_function_is_verified(options):
    assert verify(lambda: tower(cls=Drops), RULES, "tp=2", **options).ok


def test_it_is_still_compared():
    """With dropout off, a wrong plan is found: the row linear's input is not what its weight sums over."""
    wrong = {**RULES, "up": "replicate"}
    with pytest.raises(Exception, match="down"):
        assert verify(lambda: tower(cls=Drops), wrong, "tp=2").ok


def test_a_plan_is_derived():
    derived = derive_plan(Drops(), {"x": torch.randn(2, 3, 12)})
    assert {rule.pattern: rule.style.word for rule in derived.plan.rules}["up"] == "colwise"


X = torch.arange(1.0, 25).view(2, 3, 4)
CALLS = {
    "a position": lambda: F.dropout(X, 0.5, True),
    "the default": lambda: F.dropout(X),
    "a name": lambda: F.dropout(X, p=0.5),
    "torch's": lambda: torch.dropout(X, 0.5, True),
    "in place": lambda: F.dropout(X.clone(), 0.5, True, True),
    "channels": lambda: F.dropout1d(X, 0.5, True),
    "alpha": lambda: F.alpha_dropout(X, 0.5, True),
    "a module with a rate of another type": lambda: nn.Dropout(p=0.5)(X),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_nothing_is_dropped(call):
    assert not torch.equal(call(), X)  # it does outside
    with computing_in(torch.float32):
        assert torch.equal(call(), X)


def test_attention_drops_no_weights():
    q = torch.randn(1, 2, 5, 4)
    expected = F.scaled_dot_product_attention(q, q, q)
    for drops in ((None, 0.5), (None, 0.5, False)):
        with computing_in(torch.float32):
            assert torch.allclose(F.scaled_dot_product_attention(q, q, q, *drops), expected)
    with computing_in(torch.float32):
        assert torch.allclose(F.scaled_dot_product_attention(q, q, q, dropout_p=0.9), expected)


class DropsWhole(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.3, 0.7]))

    def forward(self, x):
        return F.dropout((x * self.scale).exp(), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_replay_of_a_recomputed_unit_drops_nothing(dtype):
    model = nn.Sequential(DropsWhole().to(dtype))
    x = torch.linspace(0.1, 0.9, 200, dtype=dtype).view(100, 2)
    exact = torch.autograd.grad((x * model[0].scale).exp().pow(2).sum(), model[0].scale)[0]
    recompute(model, "full", units=["0"])
    widen_recompute(model, dtype)
    with computing_in(dtype):
        out = model(x).pow(2).sum()
    out.backward()
    assert torch.allclose(model[0].scale.grad, exact)
