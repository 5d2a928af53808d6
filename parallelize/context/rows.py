"""Which rows of a sequence each rank of `cp` holds. Pure arithmetic, torch-free.

`cp` is a ring of places, each of `ulysses` neighbouring ranks: rank = place * ulysses + member. The sequence is dealt out to
places, and a place's rows, in order, to its members.

Under a causal mask late rows see more than early ones. So the sequence is cut into 2R chunks, and place r of R holds chunks r
and 2R-1-r: every place then has the same work in every step of the ring. Without a mask, and with one place, chunks are runs.

Source of the balanced order: Brandon et al., Striped Attention, arXiv:2311.09431, in the chunked form of Llama 3's training
(arXiv:2407.21783, sec. 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from parallelize.layout import even_interval

Run = tuple[int, int]


@dataclass(frozen=True)
class SequenceRows:
    """A sequence of `full` rows over cp = ring * ulysses ranks. Chunks may be uneven, or empty."""

    full: int
    ring: int = 1
    ulysses: int = 1
    balanced: bool = True

    @property
    def size(self) -> int:
        return self.ring * self.ulysses

    def of_place(self, place: int) -> tuple[Run, ...]:
        """The runs of rows that a place of the ring holds, in order."""
        if not self.balanced or self.ring == 1:
            runs = [even_interval(self.full, self.ring, place)]
        else:
            runs = [even_interval(self.full, 2 * self.ring, chunk) for chunk in (place, 2 * self.ring - 1 - place)]
        return tuple(run for run in runs if run[0] < run[1])

    def members(self, place: int) -> tuple[int, ...]:
        """How many of a place's rows each of its ranks holds."""
        cuts = [even_interval(count(self.of_place(place)), self.ulysses, member) for member in range(self.ulysses)]
        return tuple(stop - start for start, stop in cuts)

    def of_rank(self, rank: int) -> tuple[Run, ...]:
        """The runs of rows that a rank of cp holds, in order."""
        place, member = divmod(rank, self.ulysses)
        runs = self.of_place(place)
        return cut(runs, *even_interval(count(runs), self.ulysses, member))

    def in_order(self) -> tuple[int, ...]:
        """Where each row of the sequence stands among all ranks' rows laid one after another."""
        where = [0] * self.full
        at = 0
        for rank in range(self.size):
            for start, stop in self.of_rank(rank):
                where[start:stop] = range(at, at + stop - start)
                at += stop - start
        return tuple(where)


def count(runs: tuple[Run, ...]) -> int:
    return sum(stop - start for start, stop in runs)


def cut(runs: tuple[Run, ...], start: int, stop: int) -> tuple[Run, ...]:
    """Rows start to stop of the rows of these runs."""
    found, before = [], 0
    for low, high in runs:
        first, last = max(low, low + start - before), min(high, low + stop - before)
        if first < last:
            found.append((first, last))
        before += high - low
    return tuple(found)
