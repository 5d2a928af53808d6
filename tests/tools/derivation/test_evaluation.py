"""A number that is read in evaluation alone, from an attribute that became local: what reads it is left whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan
from parallelize.plan.models.model_source import source_of
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.derivation.proof import provable, prove_in_evaluation

T = torch.Tensor


class Scaled(nn.Module):
    """Attention and an MLP. In evaluation the scale of attention depends on the number of heads, if `is_scaled`."""

    def __init__(self, is_scaled: bool = True, width: int = 24, heads: int = 4):
        super().__init__()
        self.is_scaled, self.n_heads = is_scaled, heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 60), nn.Linear(60, width)

    def forward(self, x: T) -> T:
        q, k, v = (f(x).view(*x.shape[:2], self.n_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scale = 1 / self.n_heads if self.is_scaled and not self.training else 0.3
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def _inputs() -> dict[str, T]:
    return {"x": torch.randn(2, 5, 24)}


def test_what_evaluation_reads_is_proven():
    derived = derive_plan(Scaled(), _inputs())
    rules = {rule.pattern: str(rule.style) for rule in derived.plan.rules}
    assert rules["up"] == "colwise" and rules["down"] == "rowwise"
    assert {"q", "k", "v", "o"} <= derived.whole.keys() and not derived.plan.local


def test_a_model_that_evaluates_as_it_trains_is_sharded():
    derived = derive_plan(Scaled(is_scaled=False), _inputs())
    assert derived.whole == {} and derived.share == 1.0
    assert [item.attribute for item in derived.plan.local] == ["n_heads"]


class _Refuses(Scaled):
    def forward(self, x: T) -> T:
        if not self.training:
            raise NotImplementedError("this model is trained alone")
        return super().forward(x)


def test_a_model_without_evaluation_is_proven_in_training():
    plan = parse_plan('schema_version: 1\ntensor_parallel: {up: colwise, down: rowwise, "**": replicate}')
    source = provable(source_of(_Refuses()), _Refuses(), _inputs())
    assert prove_in_evaluation(source, plan, 2) is None
    assert derive_plan(_Refuses(), _inputs()).proof.ok
