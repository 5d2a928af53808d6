"""Models in the styles of well-known code bases get plans that shard nine tenths of their layers or more, without an
edit: sizes from the shape of the input, from a shared object of settings, from layers that rearrange dims.

No head count is a width, and the width of all heads is the size of nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.resolve import resolve
from parallelize.tools.derivation.gathered_linears import is_in_layer
from tests.tools.derivation.own_models import LENGTH, VOCABULARY, Mlp, _Decoder, _PreNorm

T = torch.Tensor
HEADS, SIZE = 12, 5
WIDTH = HEADS * SIZE


class LambdaBlock(nn.Module):
    """As minGPT: the width from the input, a masked softmax, an MLP that is a lambda over modules in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.ones(32, 32).tril()[None, None])
        self.n_head, self.n_embd = HEADS, WIDTH
        self.mlp = nn.ModuleDict(dict(fc=nn.Linear(WIDTH, 4 * WIDTH), proj=nn.Linear(4 * WIDTH, WIDTH), act=nn.GELU()))
        mlp = self.mlp
        self.mlpf = lambda x: mlp.proj(mlp.act(mlp.fc(x)))

    def forward(self, x: T) -> T:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))

    def attention(self, x: T) -> T:
        B, length, C = x.size()
        q, k, v = (
            y.view(B, length, self.n_head, C // self.n_head).transpose(1, 2)
            for y in self.c_attn(x).split(self.n_embd, dim=2)
        )
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        y = F.softmax(weights, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, length, C))


class Grouped(nn.Module):
    """As litgpt: all sizes from an object of settings, and fewer key/value heads."""

    def __init__(self, settings: SimpleNamespace) -> None:
        super().__init__()
        self.settings = settings
        self.qkv = nn.Linear(WIDTH, (settings.n_head + 2 * settings.groups) * settings.size)
        self.proj = nn.Linear(settings.n_head * settings.size, WIDTH)

    def forward(self, x: T) -> T:
        heads, groups, size = self.settings.n_head, self.settings.groups, self.settings.size
        B, length, _ = x.size()
        q, k, v = self.qkv(x).split((heads * size, groups * size, groups * size), dim=-1)
        q = q.view(B, length, heads, size).transpose(1, 2)
        k, v = (y.view(B, length, groups, size).transpose(1, 2).repeat_interleave(heads // groups, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, length, size * heads))


class Windowed(nn.Module):
    """As timm before it had attributes for the width of a head: q, k and v from one view, indexed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.scale = HEADS, SIZE**-0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: T) -> T:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, N, C))


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class Chunks(nn.Module):
    """As BLIP's code for images: chunks of one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS

    def forward(self, x: T) -> T:
        b, n, c = x.shape
        q, k, v = (y.reshape(b, n, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class TimeFirst(Linears):
    """As fairseq: tokens before rows, so that the width is read from what was made of the input; heads beside rows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, SIZE

    def forward(self, x: T) -> T:
        x = x.transpose(0, 1)
        tokens, rows, width = x.size()
        q, k, v = (
            linear(x).contiguous().view(tokens, rows * self.num_heads, self.head_dim).transpose(0, 1)
            for linear in (self.q, self.k, self.v)
        )
        weights = torch.bmm(q, k.transpose(1, 2)).mul(self.head_dim**-0.5).softmax(-1)
        y = torch.bmm(weights, v).transpose(0, 1).contiguous().view(tokens, rows, width)
        return self.out(y).transpose(0, 1)


class Reduced(nn.Module):
    """As pyramid transformers: keys and values of a shorter sequence. The width is that of views of the input too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sr, self.norm = nn.Conv1d(WIDTH, WIDTH, 2, stride=2, groups=WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: T) -> T:
        B, N, C = x.shape
        q = self.q(x).reshape(B, N, self.num_heads, C // self.num_heads).transpose(1, 2)
        short = self.sr(x.permute(0, 2, 1).reshape(B, C, N)).reshape(B, C, -1).permute(0, 2, 1)
        kv = self.kv(self.norm(short)).reshape(B, -1, 2, self.num_heads, C // self.num_heads)
        k, v = kv.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (C // self.num_heads) ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(B, N, C))


class ScaledByWidth(Linears):
    """As a tutorial: a scale of the full width, which is a product of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = HEADS, SIZE

    def forward(self, x: T) -> T:
        q, k, v = (
            linear(x).view(*x.shape[:2], self.heads, self.size).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        weights = (q @ k.transpose(-2, -1) / math.sqrt(self.heads * self.size)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(*x.shape[:2], -1))


@dataclass
class Sizes:
    heads: int = HEADS
    dim: int = WIDTH


class OfSettings(Linears):
    """Sizes in a dataclass, which all layers share."""

    def __init__(self, args: Sizes) -> None:
        super().__init__()
        self.args = args

    def forward(self, x: T) -> T:
        b, n, _ = x.shape
        q, k, v = (
            linear(x).view(b, n, self.args.heads, self.args.dim // self.args.heads).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, n, self.args.dim))


class Sliced(_Decoder):
    """Rows of a table of positions, by a slice of its weight."""

    def __init__(self) -> None:
        super().__init__(blocks_of(Windowed), WIDTH)
        self.position = nn.Embedding(32, WIDTH)

    def forward(self, ids: T) -> T:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def blocks_of(attention: type[nn.Module], *args: object) -> list[nn.Module]:
    return [_PreNorm(attention(*args), Mlp(WIDTH, 4 * WIDTH), WIDTH) for _ in range(2)]


GROUPS = SimpleNamespace(n_head=HEADS, groups=4, size=SIZE)
MODELS = {
    "lambda": lambda: _Decoder([LambdaBlock() for _ in range(2)], WIDTH),
    "grouped": lambda: _Decoder(blocks_of(Grouped, GROUPS), WIDTH),
    "settings": lambda: _Decoder(blocks_of(OfSettings, Sizes()), WIDTH),
    "positions": Sliced,
    **{each.__name__: (lambda each=each: _Decoder(blocks_of(each), WIDTH)) for each in (Windowed, Chunks, TimeFirst)},
    **{each.__name__: (lambda each=each: _Decoder(blocks_of(each), WIDTH)) for each in (Reduced, ScaledByWidth)},
}
BY_TENSOR = {"lambda", "TimeFirst", "Reduced", "ScaledByWidth"}
"""Whose code needs full sizes too."""


def share_of_layers(model: nn.Module, plan: object) -> float:
    rows = resolve(plan, describe(model), MeshSpec([("tp", 2)]), Options()).parameters.values()
    inside = [row for row in rows if is_in_layer(row.fact.names[0], model)]
    sharded = sum(prod(row.fact.shape) for row in inside if row.layout.dim is not None)
    return sharded / sum(prod(row.fact.shape) for row in inside)


def cases():
    swept = {"grouped", "positions", "Chunks", "Reduced"}
    for name in MODELS:
        for tp in (2, 4):
            yield pytest.param(name, tp, marks=[pytest.mark.sweep] if tp == 4 or name in swept else [])


@pytest.mark.parametrize(("name", "tp"), cases())
def test_nine_tenths_of_the_layers_are_sharded(name, tp):
    derived = derive_plan(MODELS[name](), {"ids": torch.randint(0, VOCABULARY, (2, LENGTH + 1))}, tp=tp)
    assert derived.proof.ok and not derived.whole.keys() & {"blocks.0.attn.out", "blocks.0.attn.proj"}
    assert share_of_layers(derived.model, derived.plan) > 0.9 and "gathered" not in derived.text
    assert ("elsewhere=full" in derived.text) == (name in BY_TENSOR)
    if name == "settings":
        assert {item.attribute for item in derived.plan.local} == {"args.heads", "args.dim"}
