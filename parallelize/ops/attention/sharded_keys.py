"""Attention of queries that every rank has to keys of which each rank has a part: decoding with a cache that is split
over tokens.

    out = sum over ranks of exp(lse_r - lse) out_r,  lse = log(sum over ranks of exp(lse_r))

Every rank attends to its keys; outputs and log-sums are gathered in one message, and combined in the order of ranks, so
that all ranks get the same bits.

Source: combination by log-sums, Dao, FlashAttention-2, arXiv:2307.08691; of a split cache, Flash-Decoding (Dao et al.,
    2023).
"""

from __future__ import annotations

import torch

from parallelize.comm.groups import Group
from parallelize.ops.attention import kernels

T = torch.Tensor


def attend_to_shards(q: T, k: T, v: T, group: Group, scoring: kernels.Scoring, sinks: T | None = None) -> T:
    """Attention to the keys of all ranks.

    Shapes: q [B, H, m, D], the same on every rank; k [B, K, n, D] and v [B, K, n, E], of this rank, n 0 or more;
        returns
    [B, H, m, E], the same on every rank. A query that attends to no key gives zeros.

    Args:
        scoring: its mask is that of the m queries and the local keys, [B or 1, 1, rows, n].
        sinks: [H], the scores of one more key for each head, of value zero; None: none.

    Cost: one all-gather of B x H x m x (E + 2) numbers of float32 a rank (E + 1 of float64), whatever the number of
        keys.
    """
    batch, heads, num_queries, _ = q.shape
    key_heads = k.shape[1]
    rows = q.reshape(batch, key_heads, -1, q.shape[3])  # the queries that share a key head are rows of one matmul
    out, lse = _local(rows, k, v, _scoring_of_rows(scoring, num_queries))
    of_rows = None if sinks is None else sinks.to(lse.dtype).repeat_interleave(num_queries).view(1, key_heads, -1)
    combined = _combined(group.all_gather(_packed(out, lse)), out.dtype, lse.dtype, of_rows)
    return combined.to(q.dtype).view(batch, heads, num_queries, v.shape[3])


def _scoring_of_rows(scoring: kernels.Scoring, num_queries: int) -> kernels.Scoring:
    """The scoring of rows: row r is a head's query r mod m."""
    mask = scoring.mask
    if mask is None:
        return scoring

    def visible(start: int, stop: int) -> T:
        of_queries = mask(0, num_queries)
        return of_queries[:, :, torch.arange(start, stop, device=of_queries.device) % num_queries]

    return kernels.Scoring(visible, False, scoring.scale, scoring.softcap)


def _local(rows: T, k: T, v: T, scoring: kernels.Scoring) -> tuple[T, T]:
    """(output in float32 at least, log-sums) of attention to the local keys."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    if k.shape[2]:
        out, lse = kernels.forward(rows, k, v, scoring)
        return out.to(wide), lse
    out = rows.new_zeros((*rows.shape[:3], v.shape[3]), dtype=wide)
    return out, rows.new_full(rows.shape[:3], -torch.inf, dtype=kernels.lse_dtype(rows))


def _packed(out: T, lse: T) -> T:
    """[..., E] and [...] as one tensor [..., E + 1 or 2]; log-sums of float64 are two numbers of float32, bit by
    bit."""
    return torch.cat([out, lse.contiguous().unsqueeze(-1).view(out.dtype)], -1)


def _combined(packed: T, dtype: torch.dtype, lse_dtype: torch.dtype, sinks: T | None) -> T:
    """[ranks, ..., E + 1 or 2] -> [..., E]. sinks: of each row, or None."""
    width = packed.shape[-1] - lse_dtype.itemsize // dtype.itemsize
    out, lse = packed[..., :width], packed[..., width:].contiguous().view(lse_dtype).squeeze(-1)
    highest = lse.amax(0) if sinks is None else torch.maximum(lse.amax(0), sinks)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = (lse - highest).exp()
    total = weights.sum(0) if sinks is None else weights.sum(0) + (sinks - highest).exp()
    weights = weights / total.clamp_min(torch.finfo(lse_dtype).tiny)
    return (out * weights.to(dtype).unsqueeze(-1)).sum(0)
