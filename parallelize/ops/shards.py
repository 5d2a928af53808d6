"""Which rows each rank holds, and the pieces in which they are sent.

A tensor [.., rows, .., features] that is cut along one dim is seen as [outer, rows, inner]: `outer` is the product of the
dims before the cut, `inner` of those behind it. Rank r holds the rows that `torch.chunk` gives it, so shards may be uneven
or empty. Each shard travels in `steps` pieces, as equal as can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

import torch

from parallelize.layout import even_interval

T = torch.Tensor
Box = tuple[int, int, int, int]  # outer start and stop, row start and stop


@dataclass(frozen=True)
class Shards:
    """The cut of `rows` over `size` ranks; each shard in `blocks` runs of outer rows, each of them in `cuts` runs of rows."""

    outer: int
    rows: int
    size: int
    blocks: int = 1
    cuts: int = 1

    @property
    def steps(self) -> int:
        return self.blocks * self.cuts

    def interval(self, rank: int) -> tuple[int, int]:
        """[start, stop) of the rows that `rank` holds."""
        return even_interval(self.rows, self.size, rank)

    def length(self, rank: int) -> int:
        start, stop = self.interval(rank)
        return stop - start

    def peers(self, rank: int) -> tuple[int, ...]:
        """Every other rank, the next one first, so that no rank is everybody's first."""
        return tuple((rank + n) % self.size for n in range(1, self.size))

    def pieces(self, rank: int) -> tuple[Box, ...]:
        """The boxes of `rank`'s shard, one a step, in rows of the whole."""
        return _pieces(self, rank)

    def own_pieces(self, rank: int) -> tuple[Box, ...]:
        """The same, in rows of the shard."""
        start, _ = self.interval(rank)
        return tuple((a, b, lo - start, hi - start) for a, b, lo, hi in _pieces(self, rank))


@lru_cache(maxsize=4096)
def _pieces(shards: Shards, rank: int) -> tuple[Box, ...]:
    start, stop = shards.interval(rank)
    outer = [shards.outer * n // shards.blocks for n in range(shards.blocks + 1)]
    rows = [start + (stop - start) * n // shards.cuts for n in range(shards.cuts + 1)]
    return tuple((a, b, lo, hi) for a, b in pairwise(outer) for lo, hi in pairwise(rows))


@lru_cache(maxsize=4096)
def shards_of(shape: tuple[int, ...], dim: int, size: int, steps: int = 1) -> Shards:
    """The cut of a whole tensor of this shape into about so many steps.

    Where there are few outer rows, a piece lies within one of them: it is then contiguous, and nothing is copied.
    """
    outer = prod(shape[:dim])
    if steps == 1 or outer <= 1:
        return Shards(outer, shape[dim], size, 1, steps)
    if outer <= 2 * steps:
        return Shards(outer, shape[dim], size, outer, max(1, round(steps / outer)))
    return Shards(outer, shape[dim], size, steps, 1)


def as_rows(x: T, dim: int) -> T:
    """[.., rows, .., features] -> [outer, rows, inner], a view where `x` is contiguous."""
    shape = x.shape
    return x.reshape(prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :]))


def take(x: T, box: Box) -> T:
    """The box of [outer, rows, inner], a view."""
    a, b, lo, hi = box
    return x[a:b, lo:hi]


def flat(x: T) -> T:
    """[.., features] -> [vectors, features], also where a dim is empty."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def merged(boxes: list[Box]) -> list[Box]:
    """Boxes in order, those put together that make one box."""
    out: list[Box] = []
    for a, b, lo, hi in boxes:
        if out and out[-1][:2] == (a, b) and out[-1][3] == lo:
            out[-1] = (a, b, out[-1][2], hi)
        elif out and out[-1][2:] == (lo, hi) and out[-1][1] == a:
            out[-1] = (out[-1][0], b, lo, hi)
        else:
            out.append((a, b, lo, hi))
    return out
