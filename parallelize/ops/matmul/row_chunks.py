"""Which rows each rank stores, and the chunks in which they are sent.

A tensor [.., rows, .., features] that is sharded along one dim is seen as [outer, rows, inner]: `outer` is the product
of the sizes before that dim, `inner` of the sizes after it. Rank r stores the rows that `torch.chunk` assigns to it, so
shards may be uneven or empty. Each shard is sent in `steps` chunks of nearly equal size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any

import torch

from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.comm.p2p import Exchange, Step
from parallelize.comm.turns import yield_turn
from parallelize.ops.matmul.op_handshake import OpAgreement

T = torch.Tensor
RowBox = tuple[int, int, int, int]
"""outer start and stop, row start and stop"""


@dataclass(frozen=True)
class RowChunks:
    """`rows` rows sharded over `size` ranks, and each shard split into chunks.

    Attributes:
        outer_splits: chunks of a shard along `outer`.
        row_splits: chunks of each of those along its rows.
    """

    outer: int
    rows: int
    size: int
    outer_splits: int = 1
    row_splits: int = 1

    @property
    def steps(self) -> int:
        """Chunks per shard."""
        return self.outer_splits * self.row_splits

    def interval(self, rank: int) -> tuple[int, int]:
        """[start, stop) of the rows that `rank` stores."""
        return even_interval(self.rows, self.size, rank)

    def length(self, rank: int) -> int:
        start, stop = self.interval(rank)
        return stop - start

    def peers(self, rank: int) -> tuple[int, ...]:
        """Every other rank, starting with the next one, so that the ranks do not all send to the same rank first."""
        return tuple((rank + n) % self.size for n in range(1, self.size))

    def chunks(self, rank: int) -> tuple[RowBox, ...]:
        """The chunks of `rank`'s shard, one per step, in rows of the full tensor."""
        return _chunks(self, rank)

    def local_chunks(self, rank: int) -> tuple[RowBox, ...]:
        """The chunks of `rank`'s shard, one per step, in rows of the shard."""
        start, _ = self.interval(rank)
        return tuple((a, b, lo - start, hi - start) for a, b, lo, hi in _chunks(self, rank))


@lru_cache(maxsize=4096)
def _chunks(layout: RowChunks, rank: int) -> tuple[RowBox, ...]:
    start, stop = layout.interval(rank)
    outer = [layout.outer * n // layout.outer_splits for n in range(layout.outer_splits + 1)]
    rows = [start + (stop - start) * n // layout.row_splits for n in range(layout.row_splits + 1)]
    return tuple((a, b, lo, hi) for a, b in pairwise(outer) for lo, hi in pairwise(rows))


@lru_cache(maxsize=4096)
def row_chunks_of(shape: tuple[int, ...], dim: int, size: int, steps: int = 1) -> RowChunks:
    """The chunks of a full tensor of this shape that is sharded along `dim`, in about `steps` steps.

    If `outer` is small, each chunk has one index along it: such a chunk is contiguous and is sent without a copy.
    """
    outer = prod(shape[:dim])
    if steps == 1 or outer <= 1:
        return RowChunks(outer, shape[dim], size, 1, steps)
    if outer <= 2 * steps:
        return RowChunks(outer, shape[dim], size, outer, max(1, round(steps / outer)))
    return RowChunks(outer, shape[dim], size, steps, 1)


def as_rows(x: T, dim: int) -> T:
    """[.., rows, .., features] -> [outer, rows, inner], a view if `x` is contiguous."""
    shape = x.shape
    return x.reshape(prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :]))


def take(x: T, box: RowBox) -> T:
    """A box of [outer, rows, inner], as a view."""
    a, b, lo, hi = box
    return x[a:b, lo:hi]


def flat(x: T) -> T:
    """[.., features] -> [vectors, features], also if a dim is empty."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def merged(boxes: list[RowBox]) -> list[RowBox]:
    """Boxes in order, with neighbors that form one box merged."""
    out: list[RowBox] = []
    for a, b, lo, hi in boxes:
        if out and out[-1][:2] == (a, b) and out[-1][3] == lo:
            out[-1] = (a, b, out[-1][2], hi)
        elif out and out[-1][2:] == (lo, hi) and out[-1][1] == a:
            out[-1] = (out[-1][0], b, lo, hi)
        else:
            out.append((a, b, lo, hi))
    return out


# -- row gather ------------------------------------------------------------------------------------------------------
# A running all-gather of rows: each rank sends its rows once to each peer, in chunks that are used as they arrive.


_WINDOW = 2  # receive buffers in flight if chunks cannot be received in place


def gather_rows(x: T, dim: int, full: int, group: Group) -> T:
    """[.., s, ..] -> [.., full, ..]: each rank sends its rows once to each peer."""
    with RowGather(x, dim, full, group, 0) as gather:
        gather.finish()
    return gather.gathered


class RowGather:
    """A running all-gather of rows, as a context manager; leaving the block waits for what has not arrived yet.

    Args:
        x, dim, full, group: as in `all_gather_matmul`.
        steps: chunks per shard (0 means 1).
        line: what the ranks must agree on before the first message.
        stream: a number that separates messages from those of another exchange that runs at the same time.
        keep: copy local rows to the gathered tensor too; if not, only `local` has them.
    """

    def __init__(
        self,
        x: T,
        dim: int,
        full: int,
        group: Group,
        steps: int,
        *,
        line: str = "",
        stream: int = 0,
        keep: bool = True,
    ):
        self.group, self.line, self.stream, self.keep = group, line, stream, keep
        self.gathered = x.new_empty((*x.shape[:dim], full, *x.shape[dim + 1 :]))
        self.rows, self.local = as_rows(self.gathered, dim), as_rows(x.contiguous(), dim)
        self.layout = layout = row_chunks_of(tuple(self.gathered.shape), dim, group.size, max(1, steps))
        self.local_box = (0, layout.outer, *layout.interval(group.rank))
        self.peers = layout.peers(group.rank)
        self.in_place = layout.outer == layout.outer_splits or layout.rows == 0
        self.sent = [take(self.local, box).contiguous() for box in layout.local_chunks(group.rank)]
        self.buffers = [
            {rank: self._buffer(rank, step) for rank in self.peers}
            for step in range(layout.steps if self.in_place else min(_WINDOW, layout.steps))
        ]
        self.posted: list[Step] = []
        self.exchange = Exchange(group)

    def __enter__(self) -> RowGather:
        OpAgreement(self.group, self.gathered.device, self.line).check()
        try:
            for _ in self.buffers:
                self._post()
            if self.keep:
                take(self.rows, self.local_box).copy_(self.local)
        except BaseException:
            self.exchange.drain()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        with self.exchange:
            while len(self.posted) < self.layout.steps:  # after a failure: peers wait for the remaining chunks
                self.posted[len(self.posted) - len(self.buffers)].wait()
                self._post()
            if error[1] is not None:
                self.exchange.drain()  # the block's own error is the one to raise

    def arrivals(self) -> Iterator[tuple[int, RowBox, int]]:
        """(rank, box, number of chunks still to come from that rank): local rows at once, others as they arrive."""
        yield self.group.rank, self.local_box, 0
        yield_turn()
        for step in range(self.layout.steps):
            self.posted[step].wait()
            for rank in self.peers:
                box = self.layout.chunks(rank)[step]
                if not self.in_place:
                    take(self.rows, box).copy_(self._received(rank, step))
                yield rank, box, self.layout.steps - 1 - step
            if len(self.posted) < self.layout.steps:
                self._post()

    def finish(self) -> None:
        """Wait for all rows."""
        for _ in self.arrivals():
            pass

    def _post(self) -> None:
        step = len(self.posted)
        receive = {rank: self._received(rank, step) for rank in self.peers}
        self.posted.append(self.exchange.post(dict.fromkeys(self.peers, self.sent[step]), receive, self.stream))

    def _buffer(self, rank: int, step: int) -> T:
        """Where a chunk is received: in place, or in a buffer that is large enough for any chunk of that rank."""
        chunks = self.layout.chunks(rank)
        if self.in_place:
            return take(self.rows, chunks[step])
        largest = max(b - a for a, b, _, _ in chunks)
        return self.rows.new_empty((largest, chunks[step][3] - chunks[step][2], self.rows.shape[2]))

    def _received(self, rank: int, step: int) -> T:
        a, b, _, _ = self.layout.chunks(rank)[step]
        return self.buffers[step % len(self.buffers)][rank][: b - a]
