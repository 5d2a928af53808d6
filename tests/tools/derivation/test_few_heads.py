"""Fewer key/value heads than ranks: several ranks store the same head where the code allows it, and the attention is
left whole where not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan
from tests.tools.derivation.test_derived_plans import rules_of

T = torch.Tensor
WIDTH, HEADS, KV_HEADS, SIZE = 32, 8, 2, 4


class Repeated(nn.Module):
    """Keys and values are repeated for each query head, by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.group = HEADS, KV_HEADS, HEADS // KV_HEADS
        self.q, self.o = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * SIZE) for _ in range(2))

    def forward(self, x: T) -> T:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for t in (k, v))
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ByGroup(Repeated):
    """The query heads of a group in a dim of their own, so that a rank needs all of a group."""

    def forward(self, x: T) -> T:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.kv_heads, self.group, SIZE)
        k, v = (linear(x).view(batch, length, self.kv_heads, SIZE) for linear in (self.k, self.v))
        weights = torch.einsum("blgrd,bmgd->bgrlm", q, k).softmax(-1)
        return self.o(torch.einsum("bgrlm,bmgd->blgrd", weights, v).reshape(batch, length, -1))


class Model(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention, self.up, self.down = attention, nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: T) -> T:
        x = x + self.attention(x)
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.sweep
def test_several_ranks_store_the_same_head():
    derived = derive_plan(Model(Repeated()), {"x": torch.randn(2, 7, WIDTH)}, tp=4)
    assert derived.proof.ok and derived.whole == {}
    assert "heads_2: {from: 2, below_tp: replicate}" in derived.text
    assert "attention: {group: heads/heads_2, heads: heads, kv_heads: heads_2}" in derived.text
    assert rules_of(derived)["attention.{k,v}"] == "colwise(heads_2)"


def test_a_plan_for_fewer_ranks_does_not_claim_it():
    derived = derive_plan(Model(Repeated()), {"x": torch.randn(2, 7, WIDTH)}, verified=False)
    assert "below_tp" not in derived.text and rules_of(derived)["attention.{k,v}"] == "colwise(heads_2)"


def test_groups_that_a_rank_needs_in_full_are_left_whole():
    derived = derive_plan(Model(ByGroup()), {"x": torch.randn(2, 7, WIDTH)}, tp=4, verified=False)
    assert derived.whole == {f"attention.{name}": "tp=4 does not divide its 2 units" for name in "qkvo"}
    assert "tp=4 does not divide its 2 units" in derived.text and rules_of(derived)["up"] == "colwise"
