"""Own attention whose sizes are equal by chance: as many query heads for each key/value head as there are of those (64
and 8, as of Llama 70B), heads as wide as their number."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn

from parallelize import derive_plan


def expanded(self, x, shape):
    batch, length = shape
    wider = x[:, :, :, None, :].expand(batch, length, self.kv_heads, self.repeats, self.width)
    return wider.reshape(batch, length, self.kv_heads * self.repeats, self.width)


def interleaved(self, x, shape):
    return x.repeat_interleave(self.repeats, dim=2)


def by_quotient(self, x, shape):
    return x.repeat_interleave(self.heads // self.kv_heads, dim=2)


def repeated(self, x, shape):
    return x.unsqueeze(3).repeat(1, 1, 1, self.repeats, 1).flatten(2, 3)


def grouped(self, x, shape):
    return x


class Attention(nn.Module):
    def __init__(self, hidden, heads, kv_heads, width, repeat):
        super().__init__()
        self.heads, self.kv_heads, self.repeats, self.width = heads, kv_heads, heads // kv_heads, width
        self.repeat = repeat
        self.q, self.out = nn.Linear(hidden, heads * width), nn.Linear(heads * width, hidden)
        self.k, self.v = nn.Linear(hidden, kv_heads * width), nn.Linear(hidden, kv_heads * width)

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        k, v = (
            self.repeat(self, part.view(batch, length, self.kv_heads, self.width), (batch, length)).transpose(1, 2)
            for part in (self.k(x), self.v(x))
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.repeat is grouped)
        return self.out(out.transpose(1, 2).reshape(batch, length, self.heads * self.width))


class Layer(nn.Module):
    def __init__(self, hidden, *attention):
        super().__init__()
        self.attention = Attention(hidden, *attention)
        self.norm, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 3 * hidden), nn.Linear(3 * hidden, hidden)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, *attention, hidden=96):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, hidden), nn.Linear(hidden, 256)
        self.layers = nn.ModuleList(Layer(hidden, *attention) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


SIZES = {
    "as many repeats as kv heads": (16, 4, 8),
    "of Llama 70B": (64, 8, 8),
    "as wide as heads": (16, 4, 16),
    "as wide as kv heads": (16, 4, 4),
    "all three": (36, 6, 6),
}


@pytest.mark.parametrize(
    ("repeat", "sizes"),
    [
        pytest.param(repeat, sizes, marks=[pytest.mark.sweep] if (n + m) % 5 else [], id=f"{repeat.__name__}-{name}")
        for n, repeat in enumerate((expanded, interleaved, by_quotient, repeated, grouped))
        for m, (name, sizes) in enumerate(SIZES.items())
    ],
)
def test_every_projection_is_sharded(repeat, sizes):
    derived = derive_plan(lambda: Decoder(*sizes, repeat))
    assert not derived.whole and derived.share > 0.98
