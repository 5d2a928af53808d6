"""Attention of new tokens, which every rank of `cp` computes, to a cache of which each rank stores a part."""

from __future__ import annotations

import torch

from parallelize.axes.context.cache_shards import CachedSequence
from parallelize.axes.context.cached_tokens import last_positions
from parallelize.axes.context.forward_state import ContextAttention
from parallelize.base.errors import ModelError, Problem
from parallelize.ops.attention.kernels import Mask, Scoring
from parallelize.ops.attention.ring_tiles import Masking, visible_keys
from parallelize.ops.attention.sharded_keys import attend_to_shards

T = torch.Tensor


def attend_to_cache(
    module: ContextAttention,
    q: T,
    k: T,
    v: T,
    masking: Masking,
    cache: CachedSequence,
    documents: T | None,
    sinks: T | None = None,
) -> T:
    """Attention of the last tokens of a sequence to all of it.

    Shapes: q [B, H, new, D], the same on every rank; k [B, K, n, D] and v [B, K, n, E], what this rank stores of a layer; returns
    [B, H, new, E], the same on every rank.

    Raises: ModelError `wrong-rows`.
    """
    stop = cache.full
    start = stop - cache.new
    stored = cache.tokens.of_rank(cache.rank, 0, stop)
    first = max(0, start + 1 - masking.window) if masking.window else 0
    needed = cache.tokens.count(cache.rank, first, stop)
    if q.shape[2] != cache.new or not needed <= k.shape[2] <= sum(map(len, stored)):
        what = f"{module.fqn} attends from {q.shape[2]} of {cache.new} new tokens to {k.shape[2]} local keys of {needed} that it needs"
        fix = "self-attention with one cache, whose sliding layers have the model's window; or leave this model off cp"
        raise ModelError(Problem("wrong-rows", what, fix=fix))
    positions = last_positions(stored, k.shape[2])  # a sliding layer stores the last ones
    mask = None
    if documents is not None or not _all_visible(positions, start, stop, masking):
        mask = _mask(positions, start, stop, masking, documents, q.device)
    scoring = Scoring(mask, False, masking.scale, masking.softcap)
    return attend_to_shards(q, k, v, module.context.group, scoring, sinks)


def _all_visible(keys: tuple[range, ...], start: int, stop: int, masking: Masking) -> bool:
    """Whether queries `start` to `stop` - 1 attend to all of these keys of one document."""
    if not keys:
        return True
    after_none = keys[-1][-1] <= start
    return after_none and (not masking.window or keys[0][0] > stop - 1 - masking.window)


def _mask(
    keys: tuple[range, ...], start: int, stop: int, masking: Masking, documents: T | None, device: torch.device
) -> Mask:
    empty = torch.empty(0, dtype=torch.int64, device=device)
    key_positions = torch.cat([empty, *(torch.arange(r.start, r.stop, r.step, device=device) for r in keys)])

    def visible(first: int, last: int) -> T:
        return visible_keys(torch.arange(start + first, start + last, device=device), key_positions, masking, documents)

    return visible
