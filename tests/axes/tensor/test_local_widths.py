"""Attention whose code takes the full width from its input: it reads that of this rank's heads, and all else gets the
full tensor."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ShapeError, build_mesh, full_gradients, lint, parallelize_module
from parallelize.axes.tensor.local_inputs import LocalWidth, with_local_width
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.styles.contract import InputWidth
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

WIDTH, HEADS = 24, 6
T = torch.Tensor
TEXT = """
schema_version: 1
sizes: {heads: 6}
tensor_parallel:
  attention: replicate
  attention.c_attn: colwise(heads + heads + heads)
  attention.c_proj: rowwise(heads)
  "**": replicate
local: {attention: {n_head: heads, n_embd: heads}}
local_inputs: {attention: {x: width(heads)}}
"""


class Norm(nn.Module):
    """Of one's own, whose code asks for the shape of what it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: T) -> T:
        assert type(x) is T and x.shape[-1] == x.size(-1) == WIDTH
        return F.layer_norm(x, x.shape[-1:], self.weight)


class Attention(nn.Module):
    """As nanoGPT's, with a norm inside of it, and operations on its input."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.norm = HEADS, WIDTH, Norm()

    def forward(self, x: T) -> tuple[T, T]:
        B, length, C = x.size()
        assert x.shape[0] == B and x.size(1) == length and x.shape[2] == x.size(dim=2) == C
        q, k, v = self.c_attn(self.norm(x)).split(self.n_embd, dim=2)
        q, k, v = (y.view(B, length, self.n_head, C // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.c_proj(y.transpose(1, 2).contiguous().view(B, length, C)), x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.attention, self.head = nn.Embedding(40, WIDTH), Attention(), nn.Linear(WIDTH, 40)

    def forward(self, ids: T) -> T:
        out, x = self.attention(x=self.table(ids))
        assert type(out) is T and type(x) is T and x.shape[-1] == WIDTH
        return self.head(out * x)


IDS = torch.randint(0, 40, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tp", [2, 3])
def test_outputs_and_gradients_are_those_of_the_unsharded_model(tp):
    torch.manual_seed(0)
    initial = Net().double()
    expected = initial(IDS)
    expected.square().sum().backward()
    gradients = {name: p.grad for name, p in initial.named_parameters()}

    def body(rank: int) -> None:
        model = parallelize_module(copy.deepcopy(initial), build_mesh("cpu", tp=tp), parse_plan(TEXT))
        model.zero_grad()
        assert model.attention.c_attn.weight.to_local().shape == (3 * WIDTH // tp, WIDTH)
        for _ in range(2):  # the first is watched
            out = model(IDS)
            assert (out - expected).abs().max() < 1e-12
        out.square().sum().backward()
        assert worst(full_gradients(model), gradients)[0] < 1e-12
        assert copy.deepcopy(model)(IDS).shape == expected.shape

    run_ranks(tp, body)


def test_lint_sees_full_inputs_of_modules_inside():
    """The norm gets all features: its gradient needs no sum."""
    source = ModelSource("Net", lambda _: Net())
    assert not [x.problem for x in lint(source, parse_plan(TEXT), "tp=2")]


HALF = InputWidth("x", 6, 3)


def test_a_local_width_is_asked_for_and_the_tensor_is_full():
    full = torch.randn(2, 5, 24, requires_grad=True)
    x = with_local_width(full, HALF)
    assert isinstance(x, LocalWidth) and isinstance(x.shape, torch.Size)
    assert x.shape == x.size() == (2, 5, 12) and x.size(-1) == x.size(2) == x.size(dim=2) == 12 and x.size(1) == 5
    assert x.numel() == full.numel() and torch.equal(x, full)
    for out in (x * 2, x.transpose(1, 2), x[..., :20], x.to(torch.float64), F.gelu(x), torch.cat([x, full])):
        assert type(out) is T
    (x * 3).sum().backward()
    assert torch.equal(full.grad, torch.full_like(full, 3.0))


def test_what_has_no_width_stays():
    for value in (None, 3, torch.tensor(1.0)):
        assert with_local_width(value, HALF) is value
    with refused(ShapeError, "uneven-input", "25 features"):
        with_local_width(torch.ones(2, 25), HALF)


def test_one_rank_has_no_local_width():
    torch.manual_seed(0)
    initial = Net()

    def body(rank: int) -> None:
        model = parallelize_module(copy.deepcopy(initial), build_mesh("cpu", tp=1), parse_plan(TEXT))
        assert torch.equal(model(IDS), initial(IDS)) and not model.attention._forward_hooks

    run_ranks(1, body)
