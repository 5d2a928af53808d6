"""Ring attention: each rank keeps its queries; key/value blocks are sent around the ring, overlapped with compute.

    step s of P: send block (r - s) to r + 1 | attend from local queries to block (r - s), combine the outputs by
    log-sums

Backward sends the blocks around once more. The sum of a block's gradients follows it from the first of the other ranks
on, and the block's own rank, which it reaches after P - 1 messages, adds its part. A rank stores two blocks at any
time. Every block is P times smaller than the sequence, and so is everything saved for backward: q, k, v, the output and
one number per row.

`runs` says which positions of the sequence each rank of the ring has (see `Context.layout_of`). In the op's arguments
it is one list: for each rank [number of runs, start, stop, start, stop, ...]. Documents [B or 1, S] cover the full
sequence: a token attends to tokens of its own document only; -1 - d is a token of document d to which no token attends
(padding).

Source: Liu et al., Ring Attention, arXiv:2310.01889; combination by log-sums, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import Function

from parallelize.comm.groups import Group
from parallelize.comm.p2p import Exchange, Step
from parallelize.comm.turns import yield_turn
from parallelize.ops import replay_cache
from parallelize.ops.attention import kernels
from parallelize.ops.attention.ring_tiles import Masking, Ring, RingTiles, Run, num_tokens, ring_of_flat
from parallelize.ops.attention.weight_dropout import WeightDropout
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.library import define, fake

T = torch.Tensor
_BLOCKS, _GRADIENTS = 8, 9  # streams of messages; those of overlapped linears have lower numbers


def ring_attention(
    q: T,
    k: T,
    v: T,
    group: Group,
    runs: tuple[tuple[Run, ...], ...],
    masking: Masking,
    documents: T | None = None,
    dropout: WeightDropout | None = None,
    sinks: T | None = None,
) -> T:
    """Attention over a sequence that is sharded over a group.

    Shapes (s: local tokens): q [B, H, s, D], k [B, K, s, D], v [B, K, s, E]; H is a multiple of K; returns [B, H, s,
    E].

    Args:
        runs: the positions of each rank of the group, ascending.
        documents: see the module docstring.
        dropout: which attention weights are dropped; None: none. Both passes draw the masks of their tiles, 5 ns a
            weight on a core.
        sinks: [H], for each head the score of one more key that every query attends to, whose value is zero; None:
            none.

    Cost: P - 1 messages of a rank's keys and values forward; the same, and P - 1 of their gradients in float32,
        backward.
    """
    flat = [number for rank_runs in runs for number in (len(rank_runs), *(edge for run in rank_runs for edge in run))]
    return _RingAttention.apply(q, k, v, sinks, documents, flat, masking, dropout, group.key)


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: T,
        k: T,
        v: T,
        sinks: T | None,
        documents: T | None,
        runs: list[int],
        masking: Masking,
        dropout: WeightDropout | None,
        group: str,
    ) -> T:
        drawn = (0.0, []) if dropout is None else (dropout.rate, dropout.flat())
        options = (runs, masking.causal, masking.window, masking.scale, masking.softcap, *drawn, group)
        out, lse = replay_cache.run_collective(
            "ring_attention", torch.ops.parallelize.ring_attention, q, k, v, documents, *options
        )
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, documents, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad: T):
        refuse_double_backward()
        q, k, v, sinks, documents, out, lse = ctx.saved_tensors
        grads = torch.ops.parallelize.ring_attention_backward(grad, q, k, v, documents, out, lse, *ctx.options)
        of_sinks = None
        if sinks is not None:  # the score's gradient is p (grad value - delta), as of every key, and this value is zero
            weights = (_sinks_by_head(sinks, lse) - lse).exp_()
            of_sinks = (weights * (grad * out).sum(-1, dtype=lse.dtype)).sum((0, 2)).neg_().to(sinks.dtype)
        return (*grads, of_sinks, None, None, None, None, None)


def with_sinks(out: T, lse: T, sinks: T) -> tuple[T, T]:
    """(output, log-sums) of attention to one more key for each head, with a score of its own and the value zero.

    Shapes: out [B, H, s, E], lse [B, H, s], sinks [H]. Backward from the results is that of attention without it.
    """
    total = torch.logaddexp(lse, _sinks_by_head(sinks, lse))
    return out * (lse - total).exp_().to(out.dtype).unsqueeze(-1), total


def _sinks_by_head(sinks: T, lse: T) -> T:
    return sinks.to(lse.dtype).view(1, -1, 1)


@define(
    "ring_attention(Tensor q, Tensor k, Tensor v, Tensor? documents, int[] runs, bool causal, int window, float scale, "
    "float softcap, float rate, int[] dropout, str group) -> Tensor[]"
)
def _ring_attention(
    q: T,
    k: T,
    v: T,
    documents: T | None,
    runs: list[int],
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
    rate: float,
    dropout: list[int],
    group: Group,
) -> list[T]:
    """[output, log-sums: finite, 0 for rows whose keys are all masked]."""
    drawn = WeightDropout.of_flat(rate, dropout)
    tiles_of = RingTiles(q, documents, ring_of_flat(runs), Masking(causal, window, scale, softcap), drawn, group)
    combined = _CombinedOutput(q, v.shape[-1])
    with Exchange(group) as exchange:
        for ring_rank, keys, values in _ring_blocks(exchange, group, tiles_of.ring, k, v):
            for tile, mask in tiles_of.block(ring_rank):
                rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
                tensors = (q[:, :, rows], keys[:, :, columns], values[:, :, columns])
                scoring = kernels.Scoring(
                    mask, tile.kind == "causal", scale, softcap, tiles_of.dropout(tile, ring_rank)
                )
                combined.add(rows, *kernels.forward(*tensors, scoring))
    return combined.finished()


@define(
    "ring_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? documents, Tensor out, Tensor lse, "
    "int[] runs, bool causal, int window, float scale, float softcap, float rate, int[] dropout, str group) -> Tensor[]"
)
def _ring_attention_backward(
    grad: T,
    q: T,
    k: T,
    v: T,
    documents: T | None,
    out: T,
    lse: T,
    runs: list[int],
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
    rate: float,
    dropout: list[int],
    group: Group,
) -> list[T]:
    drawn = WeightDropout.of_flat(rate, dropout)
    tiles_of = RingTiles(q, documents, ring_of_flat(runs), Masking(causal, window, scale, softcap), drawn, group)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    delta = (grad * out).sum(-1, dtype=wide)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    with Exchange(group) as exchange:
        gradients = _RingGradients(exchange, group, tiles_of.ring, k, v)
        for ring_rank, keys, values in _ring_blocks(exchange, group, tiles_of.ring, k, v):
            part = k.new_zeros(keys.numel() + values.numel(), dtype=wide)
            dk, dv = _unpacked(part, k, v, keys.shape[2])
            for tile, mask in tiles_of.block(ring_rank):
                rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
                queries = kernels.QueryRows(*(x[:, :, rows] for x in (grad, q, out, lse, delta)))
                into = dq[:, :, rows], dk[:, :, columns], dv[:, :, columns]
                block = keys[:, :, columns], values[:, :, columns]
                scoring = kernels.Scoring(
                    mask, tile.kind == "causal", scale, softcap, tiles_of.dropout(tile, ring_rank)
                )
                kernels.backward(queries, *block, scoring, into)
            gradients.add(ring_rank, part)
        dk, dv = gradients.arrived()
    return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)]


@fake("ring_attention")
def _(q, k, v, documents, runs, causal, window, scale, softcap, rate, dropout, group):
    return [q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=kernels.lse_dtype(q))]


@fake("ring_attention_backward")
def _(grad, q, k, v, documents, out, lse, runs, causal, window, scale, softcap, rate, dropout, group):
    return [q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)]


# -- how tiles are combined --------------------------------------------------------------------------------------------


class _CombinedOutput:
    """Outputs of several tiles, combined: the weight of a tile is exp(its log-sum - the log-sum of all)."""

    def __init__(self, q: T, width: int):
        self.q, self.shape = q, (*q.shape[:3], width)
        self.out: T | None = None
        self.lse: T | None = None

    def add(self, rows: slice, out: T, lse: T) -> None:
        if self.out is None and rows == slice(0, self.shape[2]):
            self.out, self.lse = out, lse  # the first tile has all rows: nothing to combine
            return
        combined, sums = self._widened()
        before = sums[:, :, rows]
        total = torch.logaddexp(before, lse)
        finite = total.masked_fill(total == -torch.inf, 0.0)
        combined[:, :, rows] *= (before - finite).exp_().unsqueeze(-1)
        combined[:, :, rows] += out * (lse - finite).exp_().to(combined.dtype).unsqueeze(-1)
        sums[:, :, rows] = total

    def _widened(self) -> tuple[T, T]:
        """The combination so far, in float32 at least."""
        wide = self.q.dtype if self.q.dtype.itemsize >= 4 else torch.float32
        if self.out is None or self.lse is None:
            self.out = self.q.new_zeros(self.shape, dtype=wide)
            self.lse = self.q.new_full(self.shape[:3], -torch.inf, dtype=kernels.lse_dtype(self.q))
        self.out = self.out.to(wide)
        return self.out, self.lse

    def finished(self) -> list[T]:
        out, lse = (self.out, self.lse) if self.out is not None and self.lse is not None else self._widened()
        return [out.to(self.q.dtype), lse.masked_fill(lse == -torch.inf, 0.0)]


# -- what is sent -----------------------------------------------------------------------------------------------------


def _ring_blocks(exchange: Exchange, group: Group, ring: Ring, k: T, v: T) -> Iterator[tuple[int, T, T]]:
    """(rank, its keys, its values) of every block, the local one first; the next arrives while the caller uses one."""
    size, rank = group.size, group.rank
    block = k.new_empty(0)
    if size > 1:
        block = torch.cat([k.reshape(-1), v.reshape(-1)])
    for step in range(size):
        owner = (rank - step) % size
        arriving, posted = block, None
        if step + 1 < size:
            arriving = _empty_block(block, k, v, ring[(owner - 1) % size])
            posted = exchange.post({(rank + 1) % size: block}, {(rank - 1) % size: arriving}, _BLOCKS)
        yield (owner, k, v) if step == 0 else (owner, *_unpacked(block, k, v, num_tokens(ring[owner])))
        if posted is not None:
            yield_turn()
            exchange.finish(posted)
        block = arriving


class _RingGradients:
    """Gradients of blocks: the sum of each follows its block one step later, and every rank adds its part, the owner
    last."""

    def __init__(self, exchange: Exchange, group: Group, ring: Ring, k: T, v: T):
        self.exchange, self.group, self.ring, self.k, self.v = exchange, group, ring, k, v
        self.posted: Step | None = None
        self.own: T | None = None
        self.sum: T | None = None

    def add(self, owner: int, part: T) -> None:
        """Add this rank's part of the gradients of a block to the sum that has arrived, and send it on."""
        size, rank = self.group.size, self.group.rank
        if owner == rank:
            self.own = part
            return
        self._receive(part)
        self.sum = _empty_block(part, self.k, self.v, self.ring[(owner - 1) % size])
        self.posted = self.exchange.post({(rank + 1) % size: part}, {(rank - 1) % size: self.sum}, _GRADIENTS)

    def arrived(self) -> tuple[T, T]:
        """The gradients of this rank's block."""
        assert self.own is not None
        self._receive(self.own)
        return _unpacked(self.own, self.k, self.v, self.k.shape[2])

    def _receive(self, part: T) -> None:
        """Add the sum that is under way, if any."""
        if self.posted is not None:
            assert self.sum is not None
            yield_turn()
            self.exchange.finish(self.posted)
            part += self.sum


def _numel(like: T, tokens: int) -> int:
    batch, heads, _, width = like.shape
    return batch * heads * tokens * width


def _empty_block(like: T, k: T, v: T, runs: tuple[Run, ...]) -> T:
    """Space for the keys and values of these positions, packed."""
    tokens = num_tokens(runs)
    return like.new_empty(_numel(k, tokens) + _numel(v, tokens))


def _unpacked(block: T, k: T, v: T, tokens: int) -> tuple[T, T]:
    """Views of the keys and values in a block."""
    middle = _numel(k, tokens)
    k_shape, v_shape = ((*x.shape[:2], tokens, x.shape[3]) for x in (k, v))
    return block[:middle].view(k_shape), block[middle:].view(v_shape)
