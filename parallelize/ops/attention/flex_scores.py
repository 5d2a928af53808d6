"""`flex_attention` by explicit scores, where PyTorch has no kernel with gradients: on CPUs.

    s = score_mod(scale q k^T, b, h, i, j),  -inf where not mask_mod(b, h, i, j)
    lse = log(sum(exp(s))),  out = exp(s - lse) v

Both functions are called for one score, and mapped over all of them by `torch.vmap`, so that tensors which they read
have gradients. All scores [B, H, S, S'] are in memory, as in PyTorch's own `flex_attention` without a compiler.

Source: Dong et al., Flex Attention, arXiv:2412.05496; of PyTorch 2.13 `math_attention`, which has the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

T = torch.Tensor
ScoreMod = Callable[[T, T, T, T, T], T]
"""(score, b, h, i, j) -> score"""
MaskMod = Callable[[T, T, T, T], T]
"""(b, h, i, j) -> whether query i of head h of sequence b attends to key j"""


class Attended(NamedTuple):
    """out [B, H, S, E]; lse and max_scores [B, H, S], -inf for a row that attends to no key."""

    out: T
    lse: T
    max_scores: T


def attend_by_scores(q: T, k: T, v: T, score_mod: ScoreMod | None, mask_mod: MaskMod | None, scale: float) -> Attended:
    """Attention with scores that functions change.

    Shapes: q [B, H, S, D], k [B or 1, K, S', D], v [B or 1, K, S', E], H a multiple of K. A row that attends to no key
    gives zeros.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, length, width = q.shape
    k, v = (x.expand(batch, -1, -1, -1) for x in (k, v))
    rows = q.reshape(batch, k.shape[1], -1, width).to(wide)  # the queries that share a key head are rows of one matmul
    scores = ((rows @ k.to(wide).transpose(-2, -1)) * scale).view(batch, heads, length, k.shape[2])
    indices = [torch.arange(size, device=q.device) for size in scores.shape]
    if score_mod is not None:
        scores = over_scores(score_mod, with_scores=True)(scores, *indices).to(wide)
    if mask_mod is not None:
        visible = over_scores(mask_mod, with_scores=False)(*indices)
        scores = scores.masked_fill(visible.logical_not(), -torch.inf)
    highest = scores.detach().amax(-1)
    is_empty = highest == -torch.inf
    finite = scores.masked_fill(is_empty.unsqueeze(-1), 0.0)
    lse = finite.logsumexp(-1)
    weights = (finite - lse.unsqueeze(-1)).exp().masked_fill(is_empty.unsqueeze(-1), 0.0).to(q.dtype)
    out = weights.view(batch, k.shape[1], -1, k.shape[2]) @ v
    return Attended(out.view(batch, heads, length, v.shape[3]), lse.masked_fill(is_empty, -torch.inf), highest)


def over_scores(function: Callable[..., T], with_scores: bool) -> Callable[..., T]:
    """A function of one score, or of the indices alone, mapped over [B, H, S, S']."""
    first: tuple[Any, ...] = (0,) if with_scores else ()
    for mapped in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=first + mapped)
    return function
