"""`flex_attention` on tensors without values: an op with what the kernel saves for backward, and a share of its work.

A kernel computes the blocks of a block mask that are not empty. How many there are stands in the mask where it has
values. One that a forward makes of tensors without values is taken for causal: half of all pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from parallelize.ops.attention.flex_scores import Attended, ScoreMod, over_scores
from parallelize.ops.library import LIBRARY

T = torch.Tensor
ops: Any = torch.ops.parallelize
ASSUMED_SHARE = 0.5
"""Of pairs of a query and a key, in a block mask without values."""

LIBRARY.define("block_attention(Tensor q, Tensor k, Tensor v, float share) -> (Tensor, Tensor)")
LIBRARY.define(
    "block_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float share) -> "
    "(Tensor, Tensor, Tensor)"
)


def modeled_attention(q: T, k: T, v: T, score_mod: ScoreMod | None, block_mask: Any) -> Attended:
    """As `attend_by_scores`, of tensors on meta. One score is computed, so that what its function reads has a
    gradient."""
    score = q.new_empty((1, 1, 1, 1))
    if score_mod is not None:
        indices = [torch.arange(1, device=q.device) for _ in range(4)]
        score = over_scores(score_mod, with_scores=True)(score, *indices)
    out, lse = _Modeled.apply(q, k, v, score, computed_share(block_mask))
    return Attended(out, lse, lse.detach())


def computed_share(block_mask: Any) -> float:
    """The part of all pairs of a query and a key that a kernel computes; 1 for no mask."""
    if block_mask is None:
        return 1.0
    origin = getattr(block_mask, "origin", block_mask)
    if origin.kv_num_blocks.is_meta:
        return ASSUMED_SHARE
    return float(1 - origin.sparsity() / 100)


class _Modeled(Function):
    @staticmethod
    def forward(ctx: Any, q: T, k: T, v: T, score: T, share: float) -> Any:
        out, lse = ops.block_attention(q, k, v, share)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.share, ctx.score = share, (score.shape, score.dtype)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: T, _: T) -> Any:
        (shape, dtype), grads = ctx.score, ops.block_attention_backward(grad, *ctx.saved_tensors, ctx.share)
        return (*grads, grad.new_empty(shape, dtype=dtype), None)


@torch.library.impl(LIBRARY, "block_attention", "Meta")
def _block_attention(q: T, k: T, v: T, share: float) -> tuple[T, T]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.impl(LIBRARY, "block_attention_backward", "Meta")
def _block_attention_backward(grad: T, q: T, k: T, v: T, out: T, lse: T, share: float) -> tuple[T, T, T]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
