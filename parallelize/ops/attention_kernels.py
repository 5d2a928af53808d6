"""Attention of one tile, with the logarithm of each row's sum: what tiles are joined by, and what backward needs.

    forward   out = softmax(s) v,  lse = log(sum(exp(s))),  s = softcap(scale q k^T) + mask
    backward  by the lse and the output of the whole row, so that each tile's gradients are its part of the sum

A fused kernel serves where there is one (the CPU's; CUDA's flash attention without a mask), but in single precision: its
log-sums are rounded to float32, and the noise of tiles that are joined by them grows with the size of the scores (measured:
five times that of one kernel over all rows, in gradients of keys). Otherwise strips of rows are multiplied out, at least in
float32, with log-sums in float64; their scores stay below `STRIP_BYTES`.

Source: Dao et al., FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from parallelize.ops import fused_attention

T = torch.Tensor
Mask = Callable[[int, int], T]
"""(first row, last row + 1) of the tile -> which keys each of them sees, [B or 1, 1, rows, keys]."""

STRIP_BYTES = 64 * 2**20


def forward(q: T, k: T, v: T, mask: Mask | None, causal: bool, scale: float, softcap: float = 0.0) -> tuple[T, T]:
    """Attention of one tile.

    Shapes: q [B, H, S, D], k [B, K, S', D], v [B, K, S', E], H a multiple of K; returns [B, H, S, E], and [B, H, S] in
    `lse_dtype`. Rows that see nothing give zeros, and -inf.
    """
    if fused_attention.serves(q, k, v, mask is not None) and not softcap:
        if mask is None:
            return _fused(q, k, v, None, causal, scale)
        parts = [
            _fused(q[:, :, a:b], k, v, seen, False, scale)
            for a, b, seen in _strips(q.shape[2], _seen_bytes(q, k), mask)
        ]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
    parts = []
    for a, b, seen in _strips(q.shape[2], _score_bytes(q, k), mask):
        stop = b if causal else k.shape[2]  # later keys are not seen by this strip
        scores = _scores(q[:, :, a:b], k[:, :, :stop], seen, causal, a, scale, softcap)[0]
        highest = _finite(scores.amax(-1))
        weights = scores.sub_(highest.unsqueeze(-1)).exp_()
        total = weights.sum(-1)
        out = _spread(weights, v[:, :, :stop]).div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1))
        parts.append((out.to(q.dtype), total.to(lse_dtype(q)).log_() + highest))
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def lse_dtype(q: T) -> torch.dtype:
    """Of log-sums: half precision has float32's, which its kernels give."""
    return torch.float64 if q.dtype.itemsize >= 4 else torch.float32


def backward(
    grad: T,
    q: T,
    k: T,
    v: T,
    out: T,
    lse: T,
    delta: T,
    mask: Mask | None,
    causal: bool,
    scale: float,
    softcap: float = 0.0,
) -> tuple[T, T, T]:
    """A tile's part of the gradients of q, k and v.

    Args:
        out, lse: of the whole rows, finite. delta: sum(grad * out) of each row, [B, H, S].
    """
    if fused_attention.serves(q, k, v, mask is not None) and not softcap:
        if mask is None:
            return fused_attention.backward(grad, q, k, v, out, lse, None, causal, scale)
        parts = []
        for a, b, seen in _strips(q.shape[2], _seen_bytes(q, k), mask):
            rows = (x[:, :, a:b] for x in (grad, q))
            late = (x[:, :, a:b] for x in (out, lse))
            parts.append(fused_attention.backward(*rows, k, v, *late, _additive(seen, q), False, scale))
        return torch.cat([dq for dq, _, _ in parts], 2), sum_of([p[1] for p in parts]), sum_of([p[2] for p in parts])
    parts = []
    for a, b, seen in _strips(q.shape[2], _score_bytes(q, k), mask):
        rows, stop = [x[:, :, a:b] for x in (grad, q, lse, delta)], b if causal else k.shape[2]
        keys = k[:, :, :stop], v[:, :, :stop]
        parts.append(_strip_backward(*rows, *keys, seen, causal, a, scale, softcap))
    dk, dv = parts[-1][1:]  # the last strip has all keys
    for _, gk, gv in parts[:-1]:
        dk[:, :, : gk.shape[2]] += gk
        dv[:, :, : gv.shape[2]] += gv
    return torch.cat([dq for dq, _, _ in parts], 2), dk, dv


def sum_of(parts: list[T]) -> T:
    total = parts[0]
    for part in parts[1:]:
        total = total.add_(part)
    return total


def _strip_backward(
    grad: T,
    q: T,
    lse: T,
    delta: T,
    k: T,
    v: T,
    seen: T | None,
    causal: bool,
    first: int,
    scale: float,
    softcap: float,
) -> tuple[T, T, T]:
    scores, slope = _scores(q, k, seen, causal, first, scale, softcap)
    near = lse.to(scores.dtype)
    weights = scores.sub_(near.unsqueeze(-1)).exp_().mul_((near - lse).exp().to(scores.dtype).unsqueeze(-1))
    wide = grad.to(weights.dtype)
    dv = _collected(weights, wide, v.shape[1])
    ds = weights.mul_(_against(wide, v).sub_(delta.unsqueeze(-1))).mul_(scale)
    if slope is not None:
        ds = ds.mul_(slope)
    dq = _spread(ds, k)
    return dq.to(q.dtype), _collected(ds, q.to(ds.dtype), k.shape[1]).to(k.dtype), dv.to(v.dtype)


def _scores(q: T, k: T, seen: T | None, causal: bool, first: int, scale: float, softcap: float) -> tuple[T, T | None]:
    """(scores [B, H, S, S'], the slope of the soft cap); -inf where a row does not see a key."""
    wide = q if q.dtype == torch.float64 else q.float()
    scores = _against(wide, k).mul_(scale)
    slope = None
    if softcap:
        bent = (scores / softcap).tanh_()
        slope, scores = 1 - bent.square(), bent.mul_(softcap)
    if causal:
        rows = torch.arange(first, first + q.shape[2], device=q.device)
        seen = rows.unsqueeze(-1) >= torch.arange(k.shape[2], device=q.device)
    if seen is not None:
        scores = scores.masked_fill_(~seen, -torch.inf)
    return scores, slope


# heads that share a key head stand beside each other, so rows of a group are rows of one product


def _against(q: T, k: T) -> T:
    """q [B, H, S, D] times k [B, K, S', D] over the last dim -> [B, H, S, S']."""
    batch, heads, rows, _ = q.shape
    return (_grouped(q, k.shape[1]) @ k.to(q.dtype).transpose(-1, -2)).view(batch, heads, rows, k.shape[2])


def _spread(weights: T, v: T) -> T:
    """weights [B, H, S, S'] times v [B, K, S', E] -> [B, H, S, E]."""
    batch, heads, rows, _ = weights.shape
    return (_grouped(weights, v.shape[1]) @ v.to(weights.dtype)).view(batch, heads, rows, v.shape[3])


def _collected(weights: T, rows: T, heads: int) -> T:
    """weights [B, H, S, S'] and rows [B, H, S, E], summed over rows and over heads of a group -> [B, K, S', E]."""
    return _grouped(weights, heads).transpose(-1, -2) @ _grouped(rows, heads)


def _grouped(x: T, heads: int) -> T:
    """[B, H, S, D] -> [B, K, H/K * S, D]."""
    return x.reshape(x.shape[0], heads, -1, x.shape[3])


def _fused(q: T, k: T, v: T, seen: T | None, causal: bool, scale: float) -> tuple[T, T]:
    out, lse = fused_attention.forward(q, k, v, _additive(seen, q), causal, scale)
    if seen is not None:  # the kernel says 0 for a row that sees nothing
        lse = lse.masked_fill(~seen.any(-1), -torch.inf)
    return out, lse


def _additive(seen: T | None, q: T) -> T | None:
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)


def _finite(lse: T) -> T:
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _strips(rows: int, row_bytes: int, mask: Mask | None) -> Iterator[tuple[int, int, T | None]]:
    """Runs of a tile's rows that keep scores or masks small, with what each of them sees."""
    step = max(1, min(rows, STRIP_BYTES // max(1, row_bytes)))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        yield start, stop, None if mask is None else mask(start, stop)


def _score_bytes(q: T, k: T) -> int:
    return q.shape[0] * q.shape[1] * k.shape[2] * max(4, q.element_size())


def _seen_bytes(q: T, k: T) -> int:
    return q.shape[0] * k.shape[2] * (1 + q.element_size())
