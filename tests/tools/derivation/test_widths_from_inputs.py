"""Attention that takes its width from its input, as in nanoGPT, minGPT and older timm, is sharded over heads, also
where the code needs the full width too. Where no plan is proven, it says the line and the edit, which works."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan
from tests.tools.derivation.own_models import LENGTH, VOCABULARY, Mlp, _Decoder, _PreNorm

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


class PatchAttention(nn.Module):
    """As in older versions of timm."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: T) -> T:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1) * (C // self.num_heads) ** -0.5).softmax(dim=-1)
        return self.out((attn @ v).transpose(1, 2).reshape(B, N, C))


class LikeItsInput(Attention):
    """Gives the result the shape of the input."""

    def forward(self, x: T) -> T:
        q, k, v = (y.unflatten(2, (self.n_head, -1)).transpose(1, 2) for y in self.qkv(x).split(self.n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class NeedsAll(Attention):
    """Its scale is of the full width."""

    def forward(self, x: T) -> T:
        B, length, C = x.size()
        q, k, v = (
            y.view(B, length, self.n_head, C // self.n_head).transpose(1, 2)
            for y in self.qkv(x).split(self.n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, scale=C**-0.5)
        return self.out(y.transpose(1, 2).contiguous().view(B, length, C))


class OfAGlobal(Attention):
    """Its width is a number of the file."""

    def forward(self, x: T) -> T:
        (B, length, _), C = x.size(), HIDDEN
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


def in_layers(attention: type[nn.Module]) -> nn.Module:
    """Two layers, of which a region for sequence parallelism may be made."""
    width = HIDDEN
    return _Decoder([_PreNorm(attention(), Mlp(width, 80), width) for _ in range(2)], width)


@pytest.mark.parametrize(
    "attention", [Attention, *(pytest.param(each, marks=pytest.mark.sweep) for each in (PatchAttention, LikeItsInput))]
)
def test_attention_is_sharded_over_heads(attention):
    """Also where a rank has a part of the tokens between layers."""
    derived = derive_plan(in_layers(attention), {"ids": torch.randint(0, VOCABULARY, (2, LENGTH))}, tp=2)
    assert not any("attn" in name for name in derived.whole) and "sequence parallel" in str(derived.proof)
    assert {rule.pattern: rule.style.word for rule in derived.plan.rules}["blocks.*.attn.out"] == "rowwise"
    assert [(item.pattern, item.argument, item.size) for item in derived.plan.local_inputs] == [
        ("blocks.*.attn", "x", "heads")
    ]


def test_code_that_needs_the_full_width_too_knows_both():
    derived = derive_plan(in_layers(NeedsAll), {"ids": torch.randint(0, VOCABULARY, (2, LENGTH))}, tp=2)
    assert not derived.whole and "sequence parallel" in str(derived.proof)
    assert 'blocks.*.attn: {x: "width(heads, elsewhere=full)"}' in derived.text
    assert all(item.elsewhere_full for item in derived.plan.local_inputs)


def test_what_is_left_whole_says_the_line_and_the_edit():
    derived = derive_plan(Net(OfAGlobal), tp=2)
    reason = derived.whole["attention.qkv"]
    assert "`C // self.n_head`, line" in reason and "test_widths_from_inputs.py" in reason and "flatten(2)" in reason
    assert reason in derived.text.replace("\n", " ")


@pytest.mark.sweep
def test_after_the_edit_attention_is_sharded():
    derived = derive_plan(Net(EditedAttention), tp=2)
    assert not derived.whole and not derived.plan.local_inputs
    assert {rule.pattern: rule.style.word for rule in derived.plan.rules}["attention.out"] == "rowwise"
