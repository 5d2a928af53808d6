"""Kernels of ring attention on a GPU: each against attention by its definition."""

from __future__ import annotations

import pytest
import torch

from parallelize.axes.context.sequence_shards import SequenceLayout
from parallelize.comm.groups import Group
from parallelize.ops.attention import kernels
from parallelize.ops.attention.ring_attention import Masking, ring_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def reference(q, k, v, masking):
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    distance = torch.arange(q.shape[2], device=q.device).unsqueeze(-1) - torch.arange(k.shape[2], device=q.device)
    visible = (distance >= 0) & (distance < (masking.window or q.shape[2]))
    scores = (q @ k.transpose(-1, -2) * masking.scale).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float32, 5e-6), (torch.float64, 1e-12)])
def test_one_rank(dtype, limit, window):
    torch.manual_seed(0)
    masking = Masking(True, window, 0.125)
    full = [torch.randn(2, heads, 300, 64, device="cuda", dtype=dtype).requires_grad_() for heads in (8, 2, 2)]
    grad = torch.randn(2, 8, 300, 64, device="cuda", dtype=dtype)
    out = ring_attention(*full, Group.alone(), (SequenceLayout(300).of_ring_rank(0),), masking)
    actual = [out, *torch.autograd.grad(out, full, grad)]
    wide = [x.detach().double().requires_grad_() for x in full]
    ref = reference(*wide, masking)
    expected_outputs = [ref, *torch.autograd.grad(ref, wide, grad.double())]
    for value, expected in zip(actual, expected_outputs, strict=True):
        assert (value - expected).abs().max() <= limit * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_some_of_the_rows(dtype):
    """A tile of a ring has some rows of the queries, whose log-sums are then not contiguous in memory."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype) for _ in range(4))
    scoring = kernels.Scoring(None, False, 0.125)
    out, lse = kernels.forward(q, k, v, scoring)
    delta = (grad * out).sum(-1, dtype=torch.float32)
    full, tiled = ([torch.zeros(q.shape, device="cuda") for _ in range(3)] for _ in range(2))
    kernels.backward(kernels.QueryRows(grad, q, out, lse, delta), k, v, scoring, tuple(full))
    for rows in (slice(0, 64), slice(64, 128)):
        part = kernels.QueryRows(*(x[:, :, rows] for x in (grad, q, out, lse, delta)))
        into = tiled[0][:, :, rows], tiled[1], tiled[2]
        kernels.backward(part, k, v, scoring, into)
    for value, expected in zip(tiled, full, strict=True):
        assert (value - expected).abs().max() <= (2e-2 if dtype == torch.bfloat16 else 1e-5) * expected.abs().max()


@pytest.mark.parametrize("keys", [64, 128, 192, 256, 704])
def test_very_negative_scores_give_finite_gradients(keys):
    """Kernels that read beyond the keys give NaN where log-sums are far below zero."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 4, n, 64, device="cuda", dtype=torch.bfloat16) for n in (128, keys, keys, 128))
    q[..., 0], k[..., 0] = 1.0, -120.0 * 8
    scoring = kernels.Scoring(None, False, 0.125)
    out, lse = kernels.forward(q, k, v, scoring)
    assert float(lse.max()) < -88.7
    into = tuple(torch.zeros(x.shape, device="cuda") for x in (q, k, v))
    rows = kernels.QueryRows(grad, q, out, lse, (grad * out).sum(-1, dtype=torch.float32))
    kernels.backward(rows, k, v, scoring, into)
    assert all(bool(x.isfinite().all()) for x in (out, *into))
