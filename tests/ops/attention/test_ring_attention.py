"""Attention over a ring of ranks equals attention on one: every mask, uneven shards, grouped heads, packed
documents."""

from __future__ import annotations

import pytest
import torch

from parallelize import build_mesh
from parallelize.axes.context.sequence_shards import SequenceLayout
from parallelize.comm.groups import Group
from parallelize.ops.attention import score_blocks
from parallelize.ops.attention.ring_attention import Masking, ring_attention
from tests.support.parity import worst
from tests.support.threads import run_ranks


def reference(q, k, v, masking, documents):
    """Attention by its definition."""
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = q @ k.transpose(-1, -2) * masking.scale
    if masking.softcap:
        scores = masking.softcap * (scores / masking.softcap).tanh()
    distance = torch.arange(q.shape[2]).unsqueeze(-1) - torch.arange(k.shape[2])
    seen = torch.ones_like(distance, dtype=torch.bool)
    if masking.causal:
        seen = distance >= 0
    if masking.window:
        seen = seen & (distance < masking.window)
    seen = seen.expand(1, 1, -1, -1)
    if documents is not None:
        of_queries = torch.where(documents < 0, -1 - documents, documents)
        seen = seen & (of_queries.unsqueeze(-1) == documents.unsqueeze(-2)).unsqueeze(1)
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.where(seen.any(-1, keepdim=True), scores, 0.0).softmax(-1).masked_fill(~seen, 0.0) @ v


def local_tokens(x, layout, rank, dim=2):
    return torch.cat([x.narrow(dim, a, b - a) for a, b in layout.of_rank(rank)], dim).contiguous()


def packed(full):
    """Two sequences: three documents, and two of which one has padding before it and the other after it."""
    first = torch.arange(full) * 3 // full
    second = torch.arange(full) * 2 // full
    second[:2] = -1
    second[-2:] = -2
    return torch.stack([first, second])


MASKS = {
    "all": Masking(scale=0.4),
    "causal": Masking(True, scale=0.4),
    "window": Masking(True, 5, 0.4),
    "wide window": Masking(True, 13, 0.4),
    "softcap": Masking(True, 0, 0.4, 1.5),
}


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("cp", "full", "balanced"), [(2, 19, True), (4, 19, True), (4, 19, False), (4, 6, True)])
def test_equals_one_rank(cp, full, balanced, mask, documents):
    check(cp, full, balanced, MASKS[mask], packed(full) if documents else None, torch.float64, 1e-12)


@pytest.mark.parametrize("mask", MASKS)
def test_in_single_precision(mask):
    check(4, 37, True, MASKS[mask], None, torch.float32, 5e-6)


@pytest.mark.parametrize("width", [8, 6])
def test_blocks_of_any_size(monkeypatch, width):
    """Scores are computed block by block; if values are narrower than keys, no fused kernel is used."""
    monkeypatch.setattr(score_blocks, "_BLOCK_ROWS", 9)
    monkeypatch.setattr(score_blocks, "_BLOCK_KEYS", 4)
    check(2, 23, True, MASKS["window"], packed(23), torch.float64, 1e-12, width)


def check(cp, full, balanced, masking, documents, dtype, limit, width=8):
    torch.manual_seed(0)
    full_qkv = [
        torch.randn(2, heads, full, size, dtype=dtype).requires_grad_() for heads, size in ((6, 8), (2, 8), (2, width))
    ]
    grad = torch.randn(2, 6, full, width, dtype=dtype)
    expected = reference(*[x.double() for x in full_qkv], masking, documents)
    expected_grads = torch.autograd.grad(expected, full_qkv, grad.double())
    layout = SequenceLayout(full, cp, 1, balanced)

    def body(rank):
        group = Group(build_mesh("cpu", cp=cp).get_group())
        shards = [local_tokens(x.detach(), layout, rank).requires_grad_() for x in full_qkv]
        runs = tuple(layout.of_ring_rank(rank) for rank in range(cp))
        out = ring_attention(*shards, group, runs, masking, documents)
        return out.detach(), torch.autograd.grad(out, shards, local_tokens(grad, layout, rank))

    results = run_ranks(cp, body)
    order = torch.tensor(layout.gathered_order())
    actual = torch.cat([out for out, _ in results], 2)[:, :, order]
    error, name = worst(
        {"out": actual, **{str(n): torch.cat([g[n] for _, g in results], 2)[:, :, order] for n in range(3)}},
        {"out": expected.detach(), **{str(n): x for n, x in enumerate(expected_grads)}},
    )
    assert error <= limit, name


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_in_half_precision_is_as_near_as_one_rank(dtype):
    torch.manual_seed(0)
    full_qkv = [torch.randn(1, 4, 64, 16, dtype=dtype) for _ in range(3)]
    masking = Masking(True, scale=0.25)
    expected = reference(*[x.double() for x in full_qkv], masking, None)
    layout = SequenceLayout(64, 4)

    def body(rank):
        group = Group(build_mesh("cpu", cp=4).get_group())
        shards = [local_tokens(x, layout, rank) for x in full_qkv]
        return ring_attention(*shards, group, tuple(map(layout.of_ring_rank, range(4))), masking)

    actual = torch.cat(run_ranks(4, body), 2)[:, :, torch.tensor(layout.gathered_order())]
    one_rank = torch.nn.functional.scaled_dot_product_attention(*full_qkv, is_causal=True, scale=0.25)
    assert actual.dtype == dtype
    # outputs of blocks are rounded before they are combined: a little more noise, of the same size
    assert (actual - expected).square().mean() <= 1.5**2 * (one_rank - expected).square().mean()


@pytest.mark.parametrize("rise", [5.0, 60.0, 400.0])
def test_scores_that_rise_from_block_to_block(monkeypatch, rise):
    """Weights relative to the highest score of the first block overflow where later scores are much larger."""
    monkeypatch.setattr(score_blocks, "_BLOCK_KEYS", 8)
    torch.manual_seed(0)
    q, k, v = torch.ones(1, 2, 16, 4), torch.randn(1, 2, 32, 4) * 0.1, torch.randn(1, 2, 32, 4)
    k[:, :, 8:] += rise / 8
    scoring = score_blocks.Scoring(None, False, 2.0)
    out, lse = score_blocks.forward(q, k, v, scoring)
    scores = 2.0 * q.double() @ k.double().transpose(-1, -2)
    assert relative(out, scores.softmax(-1) @ v.double()) < 2e-6 * max(1.0, rise / 10)
    assert relative(lse, scores.logsumexp(-1)) < 1e-6


def relative(actual, expected):
    return float((actual.double() - expected).abs().max() / expected.abs().max())
