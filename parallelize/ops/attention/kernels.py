"""Attention of one tile, with the log-sum-exp of each row, by which tiles are combined and which backward needs.

    forward   out = softmax(s) v,  lse = log(sum(exp(s))),  s = softcap(scale q k^T) + mask
    backward  from the lse and the output of the full row, so that each tile's gradients are its part of the sum

A fused kernel is used if there is one (the CPU's; CUDA's flash attention without a mask), but not in single precision: its
log-sums are rounded to float32, and the noise of tiles that are combined by them grows with the size of the scores (measured:
five times that of one kernel over all rows, in gradients of keys). Otherwise strips of rows are computed with explicit scores,
at least in float32, with log-sums in float64; the scores of a strip stay below `STRIP_BYTES`.

Source: Dao et al., FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from parallelize.ops.attention import fused_kernels

T = torch.Tensor
Mask = Callable[[int, int], T]
"""(first row, last row + 1) of the tile -> which keys each row may attend to, [B or 1, 1, rows, keys]."""

STRIP_BYTES = 2 * 2**20  # on a CPU, so that they fit its caches
_ACCELERATOR_STRIP_BYTES = 128 * 2**20  # on an accelerator, where a launch costs more than memory
_TRACED_STRIPS = 64


def forward(q: T, k: T, v: T, mask: Mask | None, causal: bool, scale: float, softcap: float = 0.0) -> tuple[T, T]:
    """Attention of one tile.

    Shapes: q [B, H, S, D], k [B, K, S', D], v [B, K, S', E], H a multiple of K; returns [B, H, S, E], and [B, H, S] in
    `lse_dtype`. A row that may attend to no key gives zeros, and -inf.
    """
    fused = _is_fused(q, k, v, mask, softcap)
    if fused and _is_long(q, k, v):
        forward(q[:, :, : _strip_rows(q, k, False)], k, v, None, False, scale)
    if fused and mask is None:
        return _fused(q, k, v, None, causal, scale)
    out, lse = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=lse_dtype(q))
    for a, b, visible in _strips(q, k, mask, fused):
        rows = q[:, :, a:b]
        stop = b if causal else k.shape[2]  # later keys are masked for this strip
        if fused:
            out[:, :, a:b], lse[:, :, a:b] = _fused(rows, k, v, visible, False, scale)
        else:
            scores = _scores(rows, k[:, :, :stop], visible, causal, a, scale, softcap)[0]
            out[:, :, a:b], lse[:, :, a:b] = _weighted(scores, v[:, :, :stop], lse.dtype)
    return out, lse


class QueryRows(NamedTuple):
    """Query rows in backward: out and lse over all keys, finite; delta = sum(grad * out) of each row, [B, H, S]."""

    grad: T
    q: T
    out: T
    lse: T
    delta: T

    def strip(self, start: int, stop: int) -> QueryRows:
        return QueryRows(*(x[:, :, start:stop] for x in self))


def backward(
    rows: QueryRows,
    k: T,
    v: T,
    mask: Mask | None,
    causal: bool,
    scale: float,
    *,
    softcap: float,
    into: tuple[T, T, T],
) -> None:
    """Add a tile's part of the gradients of q, k and v to those in `into`, which are float32 at least."""
    fused, (dq, dk, dv) = _is_fused(rows.q, k, v, mask, softcap), into
    if fused and _is_long(rows.q, k, v):
        step = _strip_rows(rows.q, k, False)
        backward(rows.strip(0, step), k, v, None, False, scale, softcap=softcap, into=(dq[:, :, :step], dk, dv))
    for a, b, visible in [(0, dq.shape[2], None)] if fused and mask is None else _strips(rows.q, k, mask, fused):
        strip, stop = rows.strip(a, b), b if causal and not fused else k.shape[2]
        keys, values = k[:, :, :stop], v[:, :, :stop]
        if fused:
            row_results, bias = (strip.out, strip.lse), _additive(visible, k)
            grads = fused_kernels.backward(strip.grad, strip.q, keys, values, *row_results, bias, causal, scale)
        else:
            grads = _strip_backward(strip, keys, values, visible, causal, a, scale, softcap)
        dq[:, :, a:b] += grads[0]
        dk[:, :, :stop] += grads[1]
        dv[:, :, :stop] += grads[2]


def _is_fused(q: T, k: T, v: T, mask: Mask | None, softcap: float) -> bool:
    return not softcap and (fused_kernels.serves(q, k, v, mask is not None) or _is_long(q, k, v))


def _is_long(q: T, k: T, v: T) -> bool:
    """Whether meta tensors would give so many strips that a trace of one strip, next to one fused call, is enough."""
    if not q.is_meta or q.dtype != torch.float32 or q.shape[-1] != v.shape[-1]:
        return False
    return q.shape[2] > _TRACED_STRIPS * _strip_rows(q, k, False)


def lse_dtype(q: T) -> torch.dtype:
    """The dtype of log-sums: float32 for half precision, as its kernels return, else float64."""
    return torch.float64 if q.dtype.itemsize >= 4 else torch.float32


def _weighted(scores: T, v: T, dtype: torch.dtype) -> tuple[T, T]:
    """(softmax(scores) v, log-sums). The scores are overwritten."""
    highest = _finite(scores.amax(-1))
    weights = scores.sub_(highest.unsqueeze(-1)).exp_()
    total = weights.sum(-1)
    out = _times_values(weights, v).div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1))
    return out, total.to(dtype).log_() + highest


def _strip_backward(
    rows: QueryRows, k: T, v: T, visible: T | None, causal: bool, first: int, scale: float, softcap: float
) -> tuple[T, T, T]:
    scores, slope = _scores(rows.q, k, visible, causal, first, scale, softcap)
    rounded = rows.lse.to(scores.dtype)
    correction = (rounded - rows.lse).exp().to(scores.dtype)
    weights = scores.sub_(rounded.unsqueeze(-1)).exp_().mul_(correction.unsqueeze(-1))
    grad = rows.grad.to(weights.dtype)
    dv = _sum_over_rows(weights, grad, v.shape[1])
    ds = weights.mul_(_times_keys(grad, v).sub_(rows.delta.unsqueeze(-1))).mul_(scale)
    if slope is not None:
        ds = ds.mul_(slope)
    return _times_values(ds, k), _sum_over_rows(ds, rows.q.to(ds.dtype), k.shape[1]), dv


def _scores(
    q: T, k: T, visible: T | None, causal: bool, first: int, scale: float, softcap: float
) -> tuple[T, T | None]:
    """(scores [B, H, S, S'], the slope of the soft cap); -inf where a key is masked."""
    wide = q if q.dtype == torch.float64 else q.float()
    scores = _times_keys(wide, k).mul_(scale)
    slope = None
    if softcap:
        capped = (scores / softcap).tanh_()
        slope, scores = 1 - capped.square(), capped.mul_(softcap)
    if causal:
        rows = torch.arange(first, first + q.shape[2], device=q.device)
        visible = rows.unsqueeze(-1) >= torch.arange(k.shape[2], device=q.device)
    if visible is not None:
        scores = scores.masked_fill_(~visible, -torch.inf)
    return scores, slope


# query heads that share a key head are adjacent, so the rows of a group are the rows of one matmul


def _times_keys(q: T, k: T) -> T:
    """q [B, H, S, D] times k [B, K, S', D] over the last dim -> [B, H, S, S']."""
    batch, heads, rows, _ = q.shape
    return (_grouped(q, k.shape[1]) @ k.to(q.dtype).transpose(-1, -2)).view(batch, heads, rows, k.shape[2])


def _times_values(weights: T, v: T) -> T:
    """weights [B, H, S, S'] times v [B, K, S', E] -> [B, H, S, E]."""
    batch, heads, rows, _ = weights.shape
    return (_grouped(weights, v.shape[1]) @ v.to(weights.dtype)).view(batch, heads, rows, v.shape[3])


def _sum_over_rows(weights: T, rows: T, heads: int) -> T:
    """weights [B, H, S, S'] and rows [B, H, S, E], summed over rows and over heads of a group -> [B, K, S', E]."""
    return _grouped(weights, heads).transpose(-1, -2) @ _grouped(rows, heads)


def _grouped(x: T, heads: int) -> T:
    """[B, H, S, D] -> [B, K, H/K * S, D]."""
    return x.reshape(x.shape[0], heads, -1, x.shape[3])


def _fused(q: T, k: T, v: T, visible: T | None, causal: bool, scale: float) -> tuple[T, T]:
    out, lse = fused_kernels.forward(q, k, v, _additive(visible, q), causal, scale)
    if visible is not None:  # the kernel returns 0 for a row whose keys are all masked
        lse = lse.masked_fill(~visible.any(-1), -torch.inf)
    return out, lse


def _additive(visible: T | None, q: T) -> T | None:
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)


def _finite(lse: T) -> T:
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _strips(q: T, k: T, mask: Mask | None, fused: bool) -> Iterator[tuple[int, int, T | None]]:
    """(first row, last row + 1, mask) of strips of a tile: they bound the size of scores, or of a fused kernel's masks."""
    rows, step = q.shape[2], _strip_rows(q, k, fused)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield start, stop, None if mask is None else mask(start, stop)


def _strip_rows(q: T, k: T, fused: bool) -> int:
    batch, heads, rows, _ = q.shape
    row_bytes = batch * k.shape[2] * (1 + q.element_size() if fused else heads * max(4, q.element_size()))
    limit = STRIP_BYTES if q.device.type == "cpu" else _ACCELERATOR_STRIP_BYTES
    return max(1, min(rows, limit // max(1, row_bytes)))
