"""Which rows each rank stores, and the chunks in which they are sent.

A tensor [.., rows, .., features] that is sharded along one dim is seen as [outer, rows, inner]: `outer` is the product of the
sizes before that dim, `inner` of the sizes after it. Rank r stores the rows that `torch.chunk` assigns to it, so shards may be
uneven or empty. Each shard is sent in `steps` chunks of nearly equal size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

import torch

from parallelize.base.layout import even_interval

T = torch.Tensor
Box = tuple[int, int, int, int]
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

    def chunks(self, rank: int) -> tuple[Box, ...]:
        """The chunks of `rank`'s shard, one per step, in rows of the full tensor."""
        return _chunks(self, rank)

    def local_chunks(self, rank: int) -> tuple[Box, ...]:
        """The chunks of `rank`'s shard, one per step, in rows of the shard."""
        start, _ = self.interval(rank)
        return tuple((a, b, lo - start, hi - start) for a, b, lo, hi in _chunks(self, rank))


@lru_cache(maxsize=4096)
def _chunks(layout: RowChunks, rank: int) -> tuple[Box, ...]:
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


def take(x: T, box: Box) -> T:
    """A box of [outer, rows, inner], as a view."""
    a, b, lo, hi = box
    return x[a:b, lo:hi]


def flat(x: T) -> T:
    """[.., features] -> [vectors, features], also if a dim is empty."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def merged(boxes: list[Box]) -> list[Box]:
    """Boxes in order, with neighbors that form one box merged."""
    out: list[Box] = []
    for a, b, lo, hi in boxes:
        if out and out[-1][:2] == (a, b) and out[-1][3] == lo:
            out[-1] = (a, b, out[-1][2], hi)
        elif out and out[-1][2:] == (lo, hi) and out[-1][1] == a:
            out[-1] = (out[-1][0], b, lo, hi)
        else:
            out.append((a, b, lo, hi))
    return out
