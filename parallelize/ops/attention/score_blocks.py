"""Attention of one tile without a fused kernel: explicit scores, of a block of rows and a block of keys at a time.

    forward   s = softcap(scale q k^T) + mask,  m' = max(m, max s),  p = exp(s - m')          for each block of keys
              o = exp(m - m') o + p v,  l = exp(m - m') l + sum p;  at the end  out = o / l,  lse = m + log l
    backward  p = exp(s - lse),  dv += p^T grad,  ds = p (grad v^T - delta),  dq += ds k,  dk += ds^T q

Everything is computed in float32 at least, log-sums in float64 where inputs are not of half precision. On a CPU a block
is of one key head and small enough for the second-level cache, so that a pass over its scores costs little beside its
matmuls (measured in float32, heads of 32, against the CPU's fused kernel: 1.3 times its forward, 1.1 times its
backward). On an accelerator a block is of all heads and keys, since a launch costs more than memory.

Source: Dao, FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from parallelize.ops.attention.weight_dropout import TileDropout

T = torch.Tensor
Mask = Callable[[int, int], T]
"""(first row, last row + 1) of the tile -> which keys each row may attend to, [B or 1, 1, rows, keys]."""

# of one key head: 1 MiB of float32 scores; backward, which has two, takes half of the rows
_BLOCK_ROWS, _BLOCK_KEYS = 512, 512
_LARGE = 1e15  # times values, still far from the largest float32
_ACCELERATOR_BLOCK_BYTES = 128 * 2**20


class QueryRows(NamedTuple):
    """Query rows in backward: out and lse over all keys, finite; delta = sum(grad * out) of each row, [B, H, S]."""

    grad: T
    q: T
    out: T
    lse: T
    delta: T

    def strip(self, start: int, stop: int) -> QueryRows:
        return QueryRows(*(x[:, :, start:stop] for x in self))


@dataclass(frozen=True)
class Scoring:
    """How the scores of a tile are computed.

    Attributes:
        mask: which keys each row may attend to; None: all.
        causal: the tile's queries and keys are the same rows, and keys after a query are masked.
        scale, softcap: see `ring_attention.Masking`.
        dropout: which weights are dropped; None: none.
    """

    mask: Mask | None
    causal: bool
    scale: float
    softcap: float = 0.0
    dropout: TileDropout | None = None

    @property
    def weight_scale(self) -> float:
        """The factor of weights that are not dropped."""
        return 1.0 if self.dropout is None else self.dropout.dropout.scale


def forward(q: T, k: T, v: T, scoring: Scoring) -> tuple[T, T]:
    """(output [B, H, S, E], log-sums [B, H, S] in `lse_dtype`), as `kernels.forward` has them."""
    tile = _Tile(q, k, v, scoring, _BLOCK_ROWS)
    out = q.new_empty((tile.heads, tile.group, q.shape[2], v.shape[3]))
    lse = q.new_empty(out.shape[:3], dtype=lse_dtype(q))
    for part in tile.parts():
        out[part.rows], lse[part.rows] = _attended(tile, part, lse.dtype)
    return out.view(*q.shape[:3], v.shape[3]), lse.view(q.shape[:3])


def _attended(tile: _Tile, part: _RowPart, dtype: torch.dtype) -> tuple[T, T]:
    """The output of these rows, [heads, group, rows, E], and their log-sums."""
    queries = tile.queries(part)
    sums = _sums_by_first_block(tile, part, queries) or _sums(tile, part, queries)
    lse = sums.total.to(dtype).log() + sums.highest
    out = sums.out.div_(sums.total.masked_fill_(sums.total == 0, 1.0))
    if tile.scoring.dropout is not None:
        out.mul_(tile.scoring.weight_scale)
    shape = (len(queries), tile.group, part.stop - part.start)
    return out.view(*shape, -1), lse.view(shape)


class _Sums(NamedTuple):
    """Over keys, of each row: p v [heads, rows, E] and p [heads, rows, 1], where p = exp(s - highest)."""

    out: T
    total: T
    highest: T

    @staticmethod
    def zeros(tile: _Tile, queries: T) -> _Sums:
        total = queries.new_zeros((*queries.shape[:2], 1))
        highest = torch.full_like(total, torch.finfo(total.dtype).min)  # finite, also of rows whose keys are all hidden
        return _Sums(queries.new_zeros((*queries.shape[:2], tile.values.shape[2])), total, highest)


def _sums(tile: _Tile, part: _RowPart, queries: T) -> _Sums:
    """By the highest score of each row, which rises from block to block."""
    out, total, highest = _Sums.zeros(tile, queries)
    for block in part.blocks:
        scores, _ = tile.scores(queries, part, block)
        above = torch.maximum(highest, scores.amax(-1, keepdim=True))
        decay, weights = highest.sub_(above).exp_(), scores.sub_(above).exp_()
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        tile.drop(weights, part, block)
        out.mul_(decay).baddbmm_(weights, tile.values[part.heads, block.first : block.stop])
        highest = above
    return _Sums(out, total, highest)


def _sums_by_first_block(tile: _Tile, part: _RowPart, queries: T) -> _Sums | None:
    """By the highest score of each row's first block, so that others need none: an eighth less time. None where sums
    grow too large."""
    if tile.device.type != "cpu" or not part.blocks or part.blocks[0].hidden is not None:
        return None
    out, total, highest = _Sums.zeros(tile, queries)
    for n, block in enumerate(part.blocks):
        scores, _ = tile.scores(queries, part, block)
        highest = highest if n else scores.amax(-1, keepdim=True)
        weights = scores.sub_(highest).exp_()
        total.add_(weights.sum(-1, keepdim=True))
        tile.drop(weights, part, block)
        out.baddbmm_(weights, tile.values[part.heads, block.first : block.stop])
    return _Sums(out, total, highest) if bool(total.max() < _LARGE) else None


def backward(rows: QueryRows, k: T, v: T, scoring: Scoring, into: tuple[T, T, T]) -> None:
    """Add the tile's part of the gradients of q, k and v to those in `into`, which have the dtype that is computed
    in."""
    tile = _Tile(rows.q, k, v, scoring, max(1, _BLOCK_ROWS // 2))
    dq = into[0].view(tile.heads, tile.group, *into[0].shape[2:])
    dk, dv = (grad.view(tile.heads, *grad.shape[2:]) for grad in into[1:])
    rounded = rows.lse.to(tile.dtype)
    # of weights, by which gradients of rows are multiplied instead
    correction = (rounded - rows.lse).exp().to(tile.dtype)
    lse, delta = tile.by_head(rounded), tile.by_head(rows.delta * correction)
    grads = tile.by_head(rows.grad * correction.unsqueeze(-1) * scoring.weight_scale)
    for part in tile.parts():
        grad, queries = grads[part.rows].flatten(1, 2), tile.queries(part)
        row_lse, row_delta = (x[part.rows].flatten(1, 2).unsqueeze(-1) for x in (lse, delta))
        row_dq = torch.zeros_like(queries)
        for block in part.blocks:
            keys = slice(block.first, block.stop)
            scores, slope = tile.scores(queries, part, block)
            weights = scores.sub_(row_lse).exp_()
            ds = tile.product(grad, tile.values[part.heads, keys], 1)
            keep = tile.keep(part, block)
            if keep is None:
                dv[part.heads, keys].baddbmm_(weights.transpose(1, 2), grad)
            else:
                dv[part.heads, keys].baddbmm_((weights * keep).transpose(1, 2), grad)
                ds.mul_(keep)
            ds.sub_(row_delta).mul_(weights)
            if slope is not None:
                ds.mul_(slope)
            row_dq.baddbmm_(ds, tile.keys[part.heads, keys])
            dk[part.heads, keys].baddbmm_(ds.transpose(1, 2), queries)
        dq[part.rows].add_(row_dq.view(dq[part.rows].shape), alpha=scoring.scale)


def lse_dtype(q: T) -> torch.dtype:
    """The dtype of log-sums: float32 for half precision, as its kernels return, else float64."""
    return torch.float64 if q.dtype.itemsize >= 4 else torch.float32


def strip_rows(q: T, k: T) -> int:
    """How many rows are computed at a time on an accelerator."""
    row_bytes = q.shape[0] * q.shape[1] * k.shape[2] * max(4, q.element_size())
    return max(1, min(q.shape[2], _ACCELERATOR_BLOCK_BYTES // max(1, row_bytes)))


class _KeyBlock(NamedTuple):
    """Keys first to stop - 1. hidden: those to which rows do not attend, [B or 1, 1, rows, keys]; None: they attend to
    all."""

    first: int
    stop: int
    hidden: T | None


class _RowPart(NamedTuple):
    """Rows start to stop - 1 of some key heads, and the blocks of keys that they attend to."""

    heads: slice
    start: int
    stop: int
    blocks: list[_KeyBlock]

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """Into tensors [heads, group, S, ...]."""
        return self.heads, slice(None), slice(self.start, self.stop)


class _Tile:
    """A tile by key heads of all samples: queries [heads, group, S, D], keys [heads, S', D], values [heads, S', E].

    The query heads that share a key head are adjacent, so that the rows of a group are the rows of one matmul.
    """

    def __init__(self, q: T, k: T, v: T, scoring: Scoring, block_rows: int):
        self.scoring, self.device = scoring, q.device
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.heads, self.kv_heads, self.group = (
            k.shape[0] * k.shape[1],
            k.shape[1],
            max(1, q.shape[1] // max(1, k.shape[1])),
        )
        self._queries = self.by_head(q)
        self.keys, self.values = (x.reshape(self.heads, *x.shape[2:]).to(self.dtype) for x in (k, v))
        self._scratch: dict[int, T] = {}
        if q.device.type == "cpu":
            rows, keys = min(q.shape[2], max(1, block_rows // self.group)), min(k.shape[2], _BLOCK_KEYS)
            heads = block_rows * _BLOCK_KEYS // max(1, rows * self.group * keys)
            self._sizes = (max(1, min(self.heads, heads)), max(1, rows), max(1, keys))
        else:
            self._sizes = (max(1, self.heads), strip_rows(q, k), max(1, k.shape[2]))

    def by_head(self, x: T) -> T:
        """[B, H, S, ...] -> [heads, group, S, ...]."""
        return x.reshape(self.heads, self.group, *x.shape[2:])

    def queries(self, part: _RowPart) -> T:
        """Scaled, [heads, group x rows, D]."""
        return (self._queries[part.rows].to(self.dtype) * self.scoring.scale).flatten(1, 2)

    def parts(self) -> Iterator[_RowPart]:
        heads, rows, _ = self._sizes
        for start in range(0, self._queries.shape[2], rows):
            stop = min(self._queries.shape[2], start + rows)
            blocks = list(self._blocks(start, stop))
            for first in range(0, self.heads, heads):
                yield _RowPart(slice(first, min(self.heads, first + heads)), start, stop, blocks)

    def scores(self, queries: T, part: _RowPart, block: _KeyBlock) -> tuple[T, T | None]:
        """([heads, group x rows, keys], the slope of the soft cap); -inf where a key is hidden."""
        scores, slope = self.product(queries, self.keys[part.heads, block.first : block.stop], 0), None
        if self.scoring.softcap:
            capped = scores.div_(self.scoring.softcap).tanh_()
            slope = 1 - capped.square()
            scores = capped.mul_(self.scoring.softcap)
        if block.hidden is not None:
            grouped = scores.view(len(scores), self.group, -1, scores.shape[2])
            grouped.masked_fill_(self._mask_of_heads(block.hidden, part.heads), -torch.inf)
        return scores, slope

    def keep(self, part: _RowPart, block: _KeyBlock) -> T | None:
        """True for weights that are not dropped, [heads, group x rows, keys]; None without dropout."""
        if self.scoring.dropout is None:
            return None
        rows, columns = slice(part.start, part.stop), slice(block.first, block.stop)
        return self.scoring.dropout.keep(self.kv_heads, self.group, part.heads, rows, columns)

    def drop(self, weights: T, part: _RowPart, block: _KeyBlock) -> None:
        """Zero the weights that are dropped; the others are scaled with the output."""
        keep = self.keep(part, block)
        if keep is not None:
            weights.mul_(keep)

    def product(self, rows: T, keys: T, index: int) -> T:
        """rows [heads, M, D] times keys [heads, N, D] over the last dim, in the scratch memory of this index."""
        shape = (len(rows), rows.shape[1], keys.shape[1])
        if index not in self._scratch or self._scratch[index].numel() < shape[0] * shape[1] * shape[2]:
            self._scratch[index] = rows.new_empty(shape[0] * shape[1] * shape[2])
        out = self._scratch[index][: shape[0] * shape[1] * shape[2]].view(shape)
        return torch.bmm(rows, keys.transpose(1, 2), out=out)

    def _blocks(self, start: int, stop: int) -> Iterator[_KeyBlock]:
        num_keys, width = self.keys.shape[1], self._sizes[2]
        visible = None if self.scoring.mask is None else self.scoring.mask(start, stop)
        for first in range(0, stop if self.scoring.causal else num_keys, width):
            last = min(stop if self.scoring.causal else num_keys, first + width)
            if visible is not None:
                yield from self._masked(_KeyBlock(first, last, ~visible[..., first:last]))
            elif self.scoring.causal and last - 1 > start:
                rows = torch.arange(start, stop, device=self.device)
                keys = torch.arange(first, last, device=self.device)
                yield _KeyBlock(first, last, (keys > rows.unsqueeze(-1)).view(1, 1, stop - start, last - first))
            else:
                yield _KeyBlock(first, last, None)

    def _masked(self, block: _KeyBlock) -> Iterator[_KeyBlock]:
        """A block as its mask has it: none where all is hidden. On an accelerator, looking would wait for it."""
        if self.device.type != "cpu" or block.hidden is None:
            yield block
        elif not block.hidden.all():
            yield block if block.hidden.any() else block._replace(hidden=None)

    def _mask_of_heads(self, hidden: T, heads: slice) -> T:
        """The mask of some heads, to be broadcast: [heads or 1, 1, rows, keys]."""
        if len(hidden) == 1:
            return hidden
        if heads.stop - heads.start == 1:
            sample = heads.start // self.kv_heads
            return hidden[sample : sample + 1]
        return hidden.repeat_interleave(self.kv_heads, 0)[heads]
