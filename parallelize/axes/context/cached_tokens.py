"""Which tokens of a cached sequence each rank of `cp` stores. Pure arithmetic, torch-free.

The tokens of a prompt that was computed over `cp` are stored where they were computed. Every token after it is computed by all
ranks, and stored by one, by turns. So each rank stores 1/cp of a sequence, to within a token per chunk of the prompt, and the rank
of a token is a function of its position alone: tokens that are removed and computed again go where they were.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelize.axes.context.sequence_shards import SequenceLayout


@dataclass(frozen=True)
class CachedTokens:
    """The tokens of a sequence over the ranks of cp.

    Args:
        prompt: the layout of the tokens that were computed over cp; of 0 tokens if none were.
    """

    prompt: SequenceLayout

    def of_rank(self, rank: int, start: int, stop: int) -> tuple[range, ...]:
        """The positions from `start` to `stop` - 1 that a rank stores, ascending."""
        runs = [range(max(start, low), min(stop, high)) for low, high in self.prompt.of_rank(rank)]
        first, size = max(start, self.prompt.full), self.prompt.size
        runs.append(range(first + (rank - first) % size, stop, size))
        return tuple(run for run in runs if run)

    def count(self, rank: int, start: int, stop: int) -> int:
        """The number of these positions."""
        return sum(map(len, self.of_rank(rank, start, stop)))


def last_positions(runs: tuple[range, ...], count: int) -> tuple[range, ...]:
    """The last `count` of these positions."""
    last: list[range] = []
    for run in reversed(runs):
        part = run[max(0, len(run) - count) :] if count else run[:0]
        count -= len(part)
        if part:
            last.insert(0, part)
    return tuple(last)
