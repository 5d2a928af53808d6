"""Which tokens of a sequence each rank of `cp` stores. Pure arithmetic, torch-free.

`cp` is a ring of R ring ranks, each of which is a ulysses group of U neighboring ranks: rank = ring_rank * U +
ulysses_rank. The sequence is split over the ring ranks, and the tokens of a ring rank, in order, over the ranks of its
ulysses group.

Under a causal mask late tokens attend to more tokens than early ones. So the sequence is split into 2R chunks, and ring
rank r stores chunks r and 2R-1-r: then all ring ranks have the same work in every step of the ring. Without a mask, and
with one ring rank, the tokens of a ring rank are consecutive.

Source of the balanced order: Brandon et al., Striped Attention, arXiv:2311.09431, in the chunked form of Llama 3's
training (arXiv:2407.21783, sec. 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelize.base.layout import count, even_interval, slice_runs

Run = tuple[int, int]
"""[start, stop) of consecutive positions"""


@dataclass(frozen=True)
class SequenceLayout:
    """A sequence of `full` tokens over cp = ring * ulysses ranks. Chunks may be uneven, or empty."""

    full: int
    ring: int = 1
    ulysses: int = 1
    balanced: bool = True

    @property
    def size(self) -> int:
        return self.ring * self.ulysses

    def of_ring_rank(self, ring_rank: int) -> tuple[Run, ...]:
        """The positions of a ring rank, ascending."""
        if not self.balanced or self.ring == 1:
            runs = [even_interval(self.full, self.ring, ring_rank)]
        else:
            chunks = (ring_rank, 2 * self.ring - 1 - ring_rank)
            runs = [even_interval(self.full, 2 * self.ring, chunk) for chunk in chunks]
        return tuple(run for run in runs if run[0] < run[1])

    def ulysses_sizes(self, ring_rank: int) -> tuple[int, ...]:
        """The number of tokens of each rank in the ulysses group of a ring rank."""
        tokens = count(self.of_ring_rank(ring_rank))
        intervals = [even_interval(tokens, self.ulysses, rank) for rank in range(self.ulysses)]
        return tuple(stop - start for start, stop in intervals)

    def of_rank(self, rank: int) -> tuple[Run, ...]:
        """The positions of a rank of cp, ascending."""
        ring_rank, ulysses_rank = divmod(rank, self.ulysses)
        runs = self.of_ring_rank(ring_rank)
        return slice_runs(runs, *even_interval(count(runs), self.ulysses, ulysses_rank))

    def num_tokens(self, rank: int) -> int:
        """The number of tokens of a rank of cp."""
        return count(self.of_rank(rank))

    def gathered_runs(self, padded: int) -> tuple[Run, ...]:
        """For the sequence in order, runs of indices in the concatenation of all ranks' tokens, each rank's padded to
        `padded`."""
        parts: list[tuple[int, Run]] = []
        for rank in range(self.size):
            index = rank * padded
            for start, stop in self.of_rank(rank):
                parts.append((start, (index, index + stop - start)))
                index += stop - start
        runs: list[Run] = []
        for _, (start, stop) in sorted(parts):
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, stop))
        return tuple(runs)

    def gathered_order(self) -> tuple[int, ...]:
        """For each position of the sequence, its index in the concatenation of all ranks' tokens."""
        index = [0] * self.full
        next_index = 0
        for rank in range(self.size):
            for start, stop in self.of_rank(rank):
                index[start:stop] = range(next_index, next_index + stop - start)
                next_index += stop - start
        return tuple(index)
