"""Attention that takes the width of a head from its input, as in nanoGPT and older timm: the plan says the line and the edit, which works."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan

HIDDEN, HEADS = 24, 6
T = torch.Tensor


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.n_head, self.n_embd = HEADS, HIDDEN

    def forward(self, x: T) -> T:
        B, length, C = x.size()
        q, k, v = (
            y.view(B, length, self.n_head, C // self.n_head).transpose(1, 2)
            for y in self.qkv(x).split(self.n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(B, length, C))


class EditedAttention(Attention):
    def __init__(self):
        super().__init__()
        self.head_dim = HIDDEN // HEADS

    def forward(self, x: T) -> T:
        q, k, v = (
            y.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for y in self.qkv(x).split(self.n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, attention: type[nn.Module]):
        super().__init__()
        self.table, self.norm, self.attention = nn.Embedding(40, HIDDEN), nn.LayerNorm(HIDDEN), attention()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 40)

    def forward(self, input_ids: T) -> T:
        x = self.table(input_ids)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def test_what_is_left_whole_says_the_line_and_the_edit():
    derived = derive_plan(Net(Attention), tp=2)
    reason = derived.whole["attention.qkv"]
    assert "`C // self.n_head`, line" in reason and "test_widths_from_inputs.py" in reason and "flatten(2)" in reason
    assert reason in derived.text.replace("\n", " ")


@pytest.mark.sweep
def test_after_the_edit_attention_is_sharded():
    derived = derive_plan(Net(EditedAttention), tp=2)
    assert not derived.whole
    assert {rule.pattern: rule.style.word for rule in derived.plan.rules}["attention.out"] == "rowwise"
