"""Attention of one tile, with the log-sum-exp of each row, by which tiles are combined and which backward needs.

    forward   out = softmax(s) v,  lse = log(sum(exp(s))),  s = softcap(scale q k^T) + mask
    backward  from the lse and the output of the full row, so that each tile's gradients are its part of the sum

A fused kernel is used where there is one (the CPU's, and CUDA's: cuDNN's or flash attention), but not with masks, whose
hidden blocks it would compute, not with dropout, which it would draw from a generator, and not in the forward of single
precision: its log-sums are rounded to float32, and those of explicit scores halve the errors of gradients (measured, of
2 and 8 tiles). Otherwise scores are explicit, a block at a time (score_blocks.py). The backward of single precision
takes log-sums that are exact: a weight exp(s - lse) is that of the rounded lse times exp(rounded - lse), by which the
gradients of its row are multiplied.

Source: Dao et al., FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

import torch

from parallelize.ops.attention import fused_kernels, score_blocks
from parallelize.ops.attention.score_blocks import Mask, QueryRows, Scoring, lse_dtype

__all__ = ["Mask", "QueryRows", "Scoring", "backward", "forward", "lse_dtype"]

T = torch.Tensor

_TRACED_STRIPS = 64


def forward(q: T, k: T, v: T, scoring: Scoring) -> tuple[T, T]:
    """Attention of one tile.

    Shapes: q [B, H, S, D], k [B, K, S', D], v [B, K, S', E], H a multiple of K; returns [B, H, S, E], and [B, H, S] in
    `lse_dtype`. A row that may attend to no key gives zeros, and -inf.
    """
    is_fused = _is_fused(q, k, v, scoring) and q.dtype != torch.float32
    if not is_fused and _is_long(q, k, v):
        score_blocks.forward(q[:, :, : score_blocks.strip_rows(q, k)], k, v, Scoring(None, False, scoring.scale))
        is_fused = True
    if is_fused:
        return fused_kernels.forward(q, k, v, scoring.causal, scoring.scale)
    return score_blocks.forward(q, k, v, scoring)


def backward(rows: QueryRows, k: T, v: T, scoring: Scoring, into: tuple[T, T, T]) -> None:
    """Add a tile's part of the gradients of q, k and v to those in `into`, which are float32 at least."""
    is_single = rows.q.dtype == torch.float32
    is_fused = _is_fused(rows.q, k, v, scoring)
    if _is_long(rows.q, k, v) and (is_single or not is_fused):  # accelerators have no kernel for single precision
        step = score_blocks.strip_rows(rows.q, k)
        traced = into[0][:, :, :step], into[1], into[2]
        score_blocks.backward(rows.strip(0, step), k, v, Scoring(None, False, scoring.scale), traced)
        is_fused = True
    if not is_fused:
        score_blocks.backward(rows, k, v, scoring, into)
        return
    grad, q, out, lse, _ = _rounded(rows) if is_single else rows
    parts = fused_kernels.backward(grad, q, k, v, out, lse, scoring.causal, scoring.scale)
    for total, part in zip(into, parts, strict=True):
        total += part


def _is_fused(q: T, k: T, v: T, scoring: Scoring) -> bool:
    plain = scoring.mask is None and scoring.dropout is None and not scoring.softcap
    return plain and fused_kernels.serves(q, k, v)


def _rounded(rows: QueryRows) -> QueryRows:
    """The rows with log-sums in float32, and gradients of which the weights are those of the exact log-sums."""
    lse = rows.lse.float()
    correction = (lse - rows.lse).exp().to(rows.grad.dtype)
    return rows._replace(grad=rows.grad * correction.unsqueeze(-1), lse=lse)


def _is_long(q: T, k: T, v: T) -> bool:
    """Whether meta tensors would give so many strips that a trace of one strip, next to one fused call, is enough."""
    return q.is_meta and q.shape[-1] == v.shape[-1] and q.shape[2] > _TRACED_STRIPS * score_blocks.strip_rows(q, k)
