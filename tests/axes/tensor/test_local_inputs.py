"""Arguments with a part for each head: each rank takes those of its heads, of every sequence, and the gradient is of
all heads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallelize import ShapeError, build_mesh, full_gradients, parallelize_module
from parallelize.plan.plan_file import parse_plan
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

HEADS = 4
TEXT = """
schema_version: 1
sizes: {heads: 4}
tensor_parallel:
  slopes: replicate
  layer: gather(x)
  layer.up: colwise(heads)
  layer.down: rowwise(heads)
local: {layer: {heads: heads}}
local_inputs:
  layer:
    bias: shard(DIM, unit=heads)
    extra: shard(1, unit=heads)
"""


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.up, self.down = nn.Linear(6, 3 * HEADS), nn.Linear(3 * HEADS, 6)

    def forward(self, x, bias, extra=None):
        """bias: [batch x heads, 1, length]; extra: [batch, heads or 1, length], or None."""
        h = self.up(x).unflatten(-1, (self.heads, 3)).transpose(1, 2).flatten(0, 1)
        h = torch.tanh(h + bias.transpose(1, 2)).unflatten(0, (-1, self.heads))
        h = h if extra is None else h * extra[..., None]
        return self.down(h.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A bias for each head and sequence, from learned slopes and a mask."""

    def __init__(self):
        super().__init__()
        self.slopes, self.layer = nn.Parameter(torch.randn(HEADS)), Layer()

    def forward(self, x, mask, extra=None):
        steps = ((mask.cumsum(-1) - 1) * mask)[:, None, :]
        bias = (self.slopes[:, None] * steps).flatten(0, 1)[:, None, :]
        return self.layer(x, bias, extra=extra)


def inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 6, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]).double()
    return x, mask, torch.rand(3, HEADS, 5, generator=generator, dtype=torch.float64)


def gradients(model, extra, of):
    x, mask, per_head = inputs()
    out = model(x, mask, {"heads": per_head, "broadcast": per_head[:, :1], "none": None}[extra])
    out.square().sum().backward()
    return {"out": out.detach(), **of()}


@pytest.mark.parametrize("extra", ["heads", "broadcast", "none"])
def test_equal_to_the_unsharded_model(extra):
    model = Model().double()
    models = [copy.deepcopy(model) for _ in range(2)]
    expected = gradients(model, extra, lambda: {n: p.grad for n, p in model.named_parameters()})

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), parse_plan(TEXT.replace("DIM", "0")))
        return gradients(models[rank], extra, lambda: full_gradients(models[rank]))

    for actual in run_ranks(2, body):
        assert worst(actual, expected)[0] <= 1e-12


def test_a_dim_that_has_no_part_for_each_head():
    def body(rank):
        model = Model().double()
        parallelize_module(model, build_mesh("cpu", tp=2), parse_plan(TEXT.replace("DIM", "2")))
        with refused(ShapeError, "uneven-input", "bias", "5 entries along dim 2", "4 heads"):
            model(*inputs())

    run_ranks(2, body)
