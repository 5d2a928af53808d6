"""Recompute on CUDA: masks of fused attention and of dropout replay, and memory is saved. Skipped without a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize.axes.recomputation.recompute import recompute, recompute_cost
from tests.support.parity import worst

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
HEADS, WIDTH = 4, 256


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, *, rate):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + F.dropout(self.out(heads.transpose(1, 2).flatten(2)), rate)
        return x + F.dropout(self.down(F.gelu(self.up(x))), rate)


class Layers(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(number))

    def forward(self, x, rate):
        for layer in self.layers:
            x = layer(x, rate=rate)
        return x


def run(net: nn.Module, rate: float) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """(output, gradients, bytes allocated between forward and backward)."""
    torch.manual_seed(3)
    x = torch.randn(4, 512, WIDTH, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    out = net(x, rate)
    saved = torch.cuda.memory_allocated() - before
    out.float().square().mean().backward()
    return out.detach(), {name: p.grad.float() for name, p in net.named_parameters()}, saved


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_replays_are_the_same_and_smaller(rate):
    """A wrong mask would change gradients by tens of percent; fused backward kernels sum in any order."""
    model = Layers(6).to("cuda", torch.bfloat16)
    expected, grads, plain = run(copy.deepcopy(model), rate)
    saved = {}
    for name, how in {"full": {}, "selective": {"mode": "selective"}}.items():
        net = recompute(copy.deepcopy(model), units="layers.*", **how)
        out, actual, saved[name] = run(net, rate)
        assert torch.equal(out, expected)
        assert worst(actual, grads)[0] < 0.03
        assert all(cost.replays == 1 for cost in recompute_cost(net).values())
    assert saved["full"] < 0.3 * plain and saved["full"] < saved["selective"] < plain
