"""Random models, each of parts that many people write: the derived plan computes what the unsharded model does, on
other inputs, weights and ranks than those of its proof."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import build_mesh, derive_plan, full_gradients, parallelize_module
from parallelize.tools.derivation.proof import projected
from tests.support.models import perturb
from tests.support.parity import worst
from tests.support.threads import run_ranks
from tests.tools.derivation import own_models as models

T = torch.Tensor
WIDTH, HEADS, HIDDEN = 24, 4, 40


class Attention(nn.Module):
    """`layout`: of q, k and v in one weight. `score`: what is done with queries, keys and their products."""

    def __init__(self, layout: str, score: str):
        super().__init__()
        self.heads, self.size, self.layout, self.score = HEADS, WIDTH // HEADS, layout, score
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.slopes, self.mix = nn.Parameter(torch.rand(HEADS)), nn.Parameter(torch.eye(HEADS))
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def forward(self, x: T) -> T:
        q, k, v = self.split(self.qkv(x))
        scores = self.scores(q, k)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def split(self, qkv: T) -> tuple[T, ...]:
        """q, k and v: [batch, heads, length, size]."""
        batch, length, _ = qkv.shape
        if self.layout == "parts":
            return tuple(t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        if self.layout == "heads":
            return qkv.view(batch, length, self.heads, 3, self.size).permute(3, 0, 2, 1, 4).unbind(0)
        if self.layout == "inner":
            return qkv.view(batch, length, self.heads, self.size, 3).transpose(1, 2).unbind(-1)
        return qkv.view(batch, length, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind(0)

    def scores(self, q: T, k: T) -> T:
        if self.score == "norm":
            q, k = self.norm(q), self.norm(k)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.size**-0.5
        if self.score == "slopes":
            steps = torch.arange(q.shape[2])
            scores = scores - self.slopes[:, None, None] * (steps - steps[:, None]).abs()
        return torch.einsum("bhqk,hg->bgqk", scores, self.mix) if self.score == "talking" else scores


class Mlp(nn.Module):
    """`gate`: how its two halves are packed. `between`: what is done with the features."""

    def __init__(self, gate: str, between: str):
        super().__init__()
        self.gate, self.between = gate, between
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.slope, self.shift = nn.Parameter(torch.rand(HIDDEN)), nn.Parameter(torch.rand(1))
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN)

    def forward(self, x: T) -> T:
        y = self.up(x)
        if self.gate == "steps":
            a, b = y[..., ::2], y[..., 1::2]
        elif self.gate == "pairs":
            a, b = y.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            a, b = y.chunk(2, dim=-1)
        return self.down(self.inner(F.silu(a) * b))

    def inner(self, y: T) -> T:
        if self.between == "learned":
            return y * (y * self.slope).sigmoid() + self.shift
        if self.between == "conv":
            return self.conv(y.transpose(1, 2)).transpose(1, 2)
        if self.between == "softmax":
            return y.softmax(-1)
        return y / y.shape[-1] ** 0.5 if self.between == "width" else y


class Block(nn.Module):
    """`order`: attention and MLP after one another, beside one another, or with a scale each."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, order: str):
        super().__init__()
        self.order, self.attention, self.mlp = order, attention, mlp
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), models.Rms(WIDTH)
        self.scale1, self.scale2 = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(1))

    def forward(self, x: T) -> T:
        if self.order == "beside":
            return x + self.attention(self.norm1(x)) + self.mlp(self.norm1(x))
        if self.order == "scaled":
            x = x + self.scale1 * self.attention(self.norm1(x))
            return x + self.scale2 * self.mlp(self.norm2(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def drawn(seed: int) -> nn.Module:
    draw = random.Random(seed).choice
    torch.manual_seed(seed)
    blocks: list[nn.Module] = [
        Block(
            Attention(draw(["parts", "heads", "inner", "three"]), draw(["plain", "norm", "slopes", "talking"])),
            Mlp(draw(["halves", "steps", "pairs"]), draw(["plain", "learned", "conv", "softmax", "width"])),
            draw(["after", "beside", "scaled"]),
        )
        for _ in range(draw([1, 2]))
    ]
    model = models._Decoder(blocks * draw([1, 1, 2]), WIDTH)
    if draw([True, False]):
        model.head.weight = model.embed.weight
    return model


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(24))
def test_a_random_model(seed):
    model = drawn(seed)
    derived = derive_plan(model, models.ids())
    assert derived.proof.ok and derived.share > 0.3
    reference = model.double()
    perturb(reference)
    ids = torch.randint(models.VOCABULARY, (3, 13))
    expected = copy.deepcopy(reference)
    out = expected(ids)
    projected(out, None).backward()
    gradients = {name: p.grad for name, p in expected.named_parameters() if p.grad is not None}

    def body(rank: int) -> tuple[float, float]:
        mode = {"sequence_parallel": bool(derived.plan.regions)}
        sharded = parallelize_module(copy.deepcopy(reference), build_mesh("cpu", tp=4), derived.plan, **mode)
        actual = sharded(ids)
        projected(actual, None).backward()
        found = {name: grad for name, grad in full_gradients(sharded).items() if name in gradients}
        difference = (actual - out).detach().abs().max() / out.detach().abs().max()
        return float(difference), worst(found, gradients)[0]

    assert all(max(errors) < 1e-12 for errors in run_ranks(4, body))
