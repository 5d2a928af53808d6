"""Ring attention: each rank keeps its query rows, and key/value blocks travel around while the block at hand is worked on.

    step s of P: send block (r - s) to r + 1 | attend own queries to block (r - s), join with what came before by log-sums

Backward goes round once more: blocks as before, and beside each block the sum of its gradients, which comes home after P steps.
At any time a rank holds two blocks. Every block is P times smaller than the sequence, and so is all that is kept for backward:
q, k, v, the output and one number a row.

Rows are dealt out by `runs` (see `context.rows`), a list a place: [number of runs, start, stop, start, stop, ...] of each place.
Documents [B or 1, S], over the whole sequence: a row sees rows of its own document only; a negative number, -1 - d, is a row
of document d that nobody sees (padding).

Source: Liu et al., Ring Attention, arXiv:2310.01889; joining by log-sums, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from parallelize.groups import Group
from parallelize.ops import attention_kernels as kernels
from parallelize.ops import tape
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.exchange import Exchange
from parallelize.ops.library import define, fake
from parallelize.ops.tiles import Run, Tile, tiles

T = torch.Tensor
_BLOCKS, _GRADIENTS = 8, 9  # streams of messages, apart from those of overlapped linears


@dataclass(frozen=True)
class Masking:
    """Who sees whom. `window`: how many rows back, itself included, 0 for all; with `causal` only."""

    causal: bool = False
    window: int = 0
    scale: float = 1.0
    softcap: float = 0.0


def ring_attention(
    q: T, k: T, v: T, group: Group, runs: tuple[tuple[Run, ...], ...], masking: Masking, documents: T | None = None
) -> T:
    """Attention of a sequence whose rows lie over a group.

    Shapes (s: this rank's rows): q [B, H, s, D], k [B, K, s, D], v [B, K, s, E]; H a multiple of K; returns [B, H, s, E].

    Args:
        runs: the rows of each rank of the group, ascending. documents: see above.

    Cost: P - 1 messages of a rank's keys and values forward; the same, and P of their gradients in float32, backward.
    """
    flat = [number for place in runs for number in (len(place), *(edge for run in place for edge in run))]
    return _RingAttention.apply(q, k, v, documents, flat, masking, group.key)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: T, k: T, v: T, documents: T | None, runs: list[int], masking: Masking, group: str) -> T:
        options = (runs, masking.causal, masking.window, masking.scale, masking.softcap, group)
        out, lse = tape.sent("ring_attention", torch.ops.parallelize.ring_attention, q, k, v, documents, *options)
        ctx.save_for_backward(q, k, v, documents, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad: T):
        refuse_double_backward()
        q, k, v, documents, out, lse = ctx.saved_tensors
        grads = torch.ops.parallelize.ring_attention_backward(grad, q, k, v, documents, out, lse, *ctx.options)
        return (*grads, None, None, None, None)


@define(
    "ring_attention(Tensor q, Tensor k, Tensor v, Tensor? documents, int[] runs, bool causal, int window, float scale, "
    "float softcap, str group) -> Tensor[]"
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
    team: Group,
) -> list[T]:
    """[output, log-sums: finite, 0 for rows that see nothing]."""
    work = _Work(q, documents, _places(runs), Masking(causal, window, scale, softcap), team)
    joined = _Joined(q, v.shape[-1])
    with Exchange(team) as wire:
        for place, keys, values in _around(wire, team, work.places, k, v):
            for tile, mask in work.tiles(place):
                rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
                part = (q[:, :, rows], keys[:, :, columns], values[:, :, columns])
                joined.add(rows, *kernels.forward(*part, mask, tile.kind == "causal", scale, softcap))
    return joined.finished()


@define(
    "ring_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? documents, Tensor out, Tensor lse, "
    "int[] runs, bool causal, int window, float scale, float softcap, str group) -> Tensor[]"
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
    team: Group,
) -> list[T]:
    work = _Work(q, documents, _places(runs), Masking(causal, window, scale, softcap), team)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    delta = (grad * out).sum(-1, dtype=wide)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    with Exchange(team) as wire:
        home = _Homecoming(wire, team, work.places, k, v)
        for place, keys, values in _around(wire, team, work.places, k, v):
            part = k.new_zeros(keys.numel() + values.numel(), dtype=wide)
            dk, dv = _opened(part, k, v, keys.shape[2])
            for tile, mask in work.tiles(place):
                rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
                own = kernels.Rows(*(x[:, :, rows] for x in (grad, q, out, lse, delta)))
                into = dq[:, :, rows], dk[:, :, columns], dv[:, :, columns]
                block = keys[:, :, columns], values[:, :, columns]
                kernels.backward(own, *block, mask, tile.kind == "causal", scale, softcap, into)
            home.add(place, part)
        dk, dv = home.arrived()
    return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)]


@fake("ring_attention")
def _(q, k, v, documents, runs, causal, window, scale, softcap, group):
    return [q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=kernels.lse_dtype(q))]


@fake("ring_attention_backward")
def _(grad, q, k, v, documents, out, lse, runs, causal, window, scale, softcap, group):
    return [q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)]


# -- who works on what ------------------------------------------------------------------------------------------------


def _places(flat: list[int]) -> list[tuple[Run, ...]]:
    places, at = [], 0
    while at < len(flat):
        edges = flat[at + 1 : at + 1 + 2 * flat[at]]
        places.append(tuple(zip(edges[::2], edges[1::2], strict=True)))
        at += 1 + len(edges)
    return places


class _Work:
    """The tiles of own queries against the block of each place, and what masks them."""

    def __init__(self, q: T, documents: T | None, places: list[tuple[Run, ...]], masking: Masking, team: Group):
        self.places, self.masking, self.device = places, masking, q.device
        self.own, self.documents = places[team.rank], documents

    def tiles(self, place: int) -> Iterator[tuple[Tile, kernels.Mask | None]]:
        keys = self.places[place]
        for tile in tiles(self.own, keys, self.masking.causal, self.masking.window):
            if self.documents is None and tile.kind != "masked":
                yield tile, None
            else:  # documents mask every tile, so none of them is the kernel's own causal one
                masked = Tile(tile.q_start, tile.q_stop, tile.k_start, tile.k_stop, "masked")
                yield masked, self._mask(tile, self._positions(keys)[tile.k_start : tile.k_stop])

    def _positions(self, runs: tuple[Run, ...]) -> T:
        parts = [torch.arange(*run, device=self.device) for run in runs]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=self.device)

    def _mask(self, tile: Tile, columns: T) -> kernels.Mask:
        own = self._positions(self.own)[tile.q_start : tile.q_stop]

        def seen(start: int, stop: int) -> T:
            rows = own[start:stop]
            back = rows.unsqueeze(-1) - columns
            mask = torch.ones_like(back, dtype=torch.bool)
            if self.masking.causal:
                mask = back >= 0
            if self.masking.window:
                mask = mask & (back < self.masking.window)
            if self.documents is None:
                return mask.view(1, 1, *mask.shape)
            mine, theirs = self.documents[:, rows], self.documents[:, columns]
            mine = torch.where(mine < 0, -1 - mine, mine)
            return (mask & (mine.unsqueeze(-1) == theirs.unsqueeze(-2))).unsqueeze(1)

        return seen


class _Joined:
    """Rows of several tiles, joined: the weight of a tile is exp(its log-sum - the log-sum of all)."""

    def __init__(self, q: T, width: int):
        self.q, self.shape = q, (*q.shape[:3], width)
        self.out: T | None = None
        self.lse: T | None = None

    def add(self, rows: slice, out: T, lse: T) -> None:
        if self.out is None and rows == slice(0, self.shape[2]):
            self.out, self.lse = out, lse  # the first tile has all rows: nothing to join
            return
        mine, sums = self._widened()
        before = sums[:, :, rows]
        total = torch.logaddexp(before, lse)
        finite = total.masked_fill(total == -torch.inf, 0.0)
        mine[:, :, rows] *= (before - finite).exp_().unsqueeze(-1)
        mine[:, :, rows] += out * (lse - finite).exp_().to(mine.dtype).unsqueeze(-1)
        sums[:, :, rows] = total

    def _widened(self) -> tuple[T, T]:
        """What is joined so far, in float32 at least."""
        wide = self.q.dtype if self.q.dtype.itemsize >= 4 else torch.float32
        if self.out is None or self.lse is None:
            self.out = self.q.new_zeros(self.shape, dtype=wide)
            self.lse = self.q.new_full(self.shape[:3], -torch.inf, dtype=kernels.lse_dtype(self.q))
        self.out = self.out.to(wide)
        return self.out, self.lse

    def finished(self) -> list[T]:
        out, lse = self._widened()
        return [out.to(self.q.dtype), lse.masked_fill(lse == -torch.inf, 0.0)]


# -- what travels -----------------------------------------------------------------------------------------------------


def _around(wire: Exchange, team: Group, places: list[tuple[Run, ...]], k: T, v: T) -> Iterator[tuple[int, T, T]]:
    """(place, its keys, its values) of every block, own first; the next is on its way while the caller works on one."""
    size, rank = team.size, team.rank
    block = k.new_empty(0)
    if size > 1:
        block = torch.cat([k.reshape(-1), v.reshape(-1)])
    for step in range(size):
        place = (rank - step) % size
        coming, posted = block, None
        if step + 1 < size:
            rows = _rows(places[(place - 1) % size])
            coming = block.new_empty(_numel(k, rows) + _numel(v, rows))
            posted = wire.post({(rank + 1) % size: block}, {(rank - 1) % size: coming}, _BLOCKS)
        yield (place, k, v) if step == 0 else (place, *_opened(block, k, v, _rows(places[place])))
        if posted is not None:
            wire.finish(posted)
        block = coming


class _Homecoming:
    """Gradients of blocks: each travels one step behind its block, and is added to where it passes."""

    def __init__(self, wire: Exchange, team: Group, places: list[tuple[Run, ...]], k: T, v: T):
        self.wire, self.team, self.places, self.k, self.v = wire, team, places, k, v
        self.posted: Any = None
        self.coming: T | None = None

    def add(self, place: int, part: T) -> None:
        """This rank's part of the gradients of a place's block: joined with those that came, and sent on."""
        size, rank = self.team.size, self.team.rank
        if self.posted is not None:
            assert self.coming is not None
            self.wire.finish(self.posted)
            part += self.coming
        if size == 1:
            self.coming = part
            return
        rows = _rows(self.places[(place - 1) % size])
        self.coming = part.new_empty(_numel(self.k, rows) + _numel(self.v, rows))
        self.posted = self.wire.post({(rank + 1) % size: part}, {(rank - 1) % size: self.coming}, _GRADIENTS)

    def arrived(self) -> tuple[T, T]:
        """The sums for this rank's own block."""
        if self.posted is not None:
            self.wire.finish(self.posted)
        assert self.coming is not None
        return _opened(self.coming, self.k, self.v, self.k.shape[2])


def _rows(runs: tuple[Run, ...]) -> int:
    return sum(stop - start for start, stop in runs)


def _numel(like: T, rows: int) -> int:
    batch, heads, _, width = like.shape
    return batch * heads * rows * width


def _opened(block: T, k: T, v: T, rows: int) -> tuple[T, T]:
    cut = _numel(k, rows)
    shapes = [(*x.shape[:2], rows, x.shape[3]) for x in (k, v)]
    return block[:cut].view(shapes[0]), block[cut:].view(shapes[1])
