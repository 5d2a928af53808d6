"""Which samples of a global batch a data rank and each of its microbatches get, so that all compute nearly as long."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from parallelize.base.errors import DataError, Problem, ShapeError, short_list
from parallelize.base.partition import balanced_parts

Deal = list[list[list[int]]]
"""By data rank, by microbatch: indices of samples in the global batch."""


def balanced_deal(
    costs: Sequence[float],
    data_ranks: int,
    num_microbatches: int = 1,
    *,
    joined: bool = False,
    lockstep: bool = False,
) -> Deal:
    """The samples of a global batch over data ranks and microbatches, so that the largest sum of costs is small.

    Data ranks are balanced, and then the microbatches of each, which come in the order of their sums, so that the
    largest ones of all ranks run together. Joined samples are also dealt to microbatches first, which is taken where
    ranks are as even, and wait less for each other's microbatches. It is a function of its arguments alone: every rank
    computes the same.

    Args:
        costs: of the samples, positive, in any unit, such as `RowCosts` gives them.
        data_ranks, num_microbatches: over which they are dealt.
        joined: any number of samples in a microbatch, one or more. False: as many in each.
        lockstep: data ranks wait for each other in every microbatch, as with ZeRO 2 and 3 and with experts over `ep`:
            each microbatch is balanced over the ranks, and microbatches may differ. A row costs what the longest sample
            costs then, at most, and may have more tokens.

    Returns: by data rank and microbatch, the indices of its samples.
    Raises: ShapeError `indivisible-batch` where there are too few samples, or, unless `joined`, not as many for each.
    Cost: up to half a second for 4,096 samples on 64 data ranks.
    """
    check_count(len(costs), data_ranks, num_microbatches, joined)
    if num_microbatches > 1 and lockstep:
        return _in_lockstep(costs, data_ranks, num_microbatches, joined)
    if not joined:
        ranks = balanced_parts(costs, data_ranks, equal=True)
        return [_within(rank, costs, num_microbatches, True) for rank in ranks]
    ranks = _with_enough(balanced_parts(costs, data_ranks), costs, num_microbatches)
    deals = [[_within(rank, costs, num_microbatches, False) for rank in ranks]]
    if num_microbatches > 1:
        microbatches = balanced_parts(costs, data_ranks * num_microbatches)
        sums = [sum(costs[n] for n in part) for part in microbatches]
        groups = balanced_parts(sums, data_ranks, equal=True)
        deals.append([[microbatches[n] for n in rank] for rank in groups])
    return min(deals, key=lambda deal: _wait(deal, costs))


def _with_enough(ranks: list[list[int]], costs: Sequence[float], least: int) -> list[list[int]]:
    """The samples of ranks, of which each has `least` or more: a rank with a long one gets the smallest of others."""
    for rank in ranks:
        while len(rank) < least:
            source = max(ranks, key=len)
            smallest = min(source, key=lambda n: (costs[n], n))
            source.remove(smallest)
            rank.append(smallest)
    return ranks


def _in_lockstep(costs: Sequence[float], data_ranks: int, num_microbatches: int, joined: bool) -> Deal:
    """Each microbatch balanced by itself, the one with the longest samples first."""
    left = sorted(range(len(costs)), key=lambda n: (-costs[n], n))
    size = len(costs) // num_microbatches
    deal: Deal = [[] for _ in range(data_ranks)]
    totals = [0.0] * data_ranks
    for microbatch in range(num_microbatches):
        more = num_microbatches - microbatch - 1
        if joined and more:
            parts, left = _filled(left, costs, data_ranks, more)
        else:
            taken, left = (left, []) if not more else (left[:size], left[size:])
            parts = _within(taken, costs, data_ranks, not joined)
        parts.sort(key=lambda part: -sum(costs[n] for n in part))
        for rank, part in zip(sorted(range(data_ranks), key=lambda r: (totals[r], r)), parts, strict=True):
            deal[rank].append(part)
            totals[rank] += sum(costs[n] for n in part)
    return deal


def _filled(left: list[int], costs: Sequence[float], count: int, more: int) -> tuple[list[list[int]], list[int]]:
    """(the samples of one microbatch of `count` ranks, those of `more` microbatches after it).

    Every rank gets as much as the largest sample that is left costs, or its part of everything where that is more.
    """
    most = max(costs[left[0]], sum(costs[n] for n in left) / count / (more + 1)) * (1 + 1e-9)
    parts: list[list[int]] = [[] for _ in range(count)]
    heap, rest, spare = [(0.0, rank) for rank in range(count)], [], len(left) - count * (more + 1)
    for n in left:
        total, rank = heap[0]
        if (parts[rank] and not spare) or total + costs[n] > most:
            rest.append(n)
            continue
        spare -= bool(parts[rank])
        parts[rank].append(n)
        heapq.heapreplace(heap, (total + costs[n], rank))
    return [sorted(part) for part in parts], rest


def _wait(deal: Deal, costs: Sequence[float]) -> tuple[float, float]:
    """(the largest sum of a rank, to a hundredth of the mean; the largest sums of each microbatch together)."""
    sums = [[sum(costs[n] for n in part) for part in rank] for rank in deal]
    largest = max(map(sum, sums)) * len(deal) / sum(map(sum, sums))
    return round(largest, 2), sum(max(parts) for parts in zip(*sums, strict=True))


def _within(samples: list[int], costs: Sequence[float], count: int, equal: bool) -> list[list[int]]:
    parts = balanced_parts([costs[n] for n in samples], count, equal=equal)
    return [[samples[n] for n in part] for part in parts]


def consecutive_deal(count: int, data_ranks: int, num_microbatches: int = 1) -> Deal:
    """The samples of a global batch in their order, as many for each data rank and microbatch. Raises: as
    `balanced_deal`."""
    check_count(count, data_ranks, num_microbatches, False)
    size = count // (data_ranks * num_microbatches)
    starts = range(0, count, size)
    parts = [[*range(start, start + size)] for start in starts]
    return [parts[rank * num_microbatches : (rank + 1) * num_microbatches] for rank in range(data_ranks)]


def check_count(count: int, data_ranks: int, num_microbatches: int, joined: bool, name: str = "a global batch") -> None:
    """Raises: ShapeError `indivisible-batch`."""
    parts = data_ranks * num_microbatches
    if count % parts if not joined else count < parts:
        over = f"{data_ranks} data ranks" + (f" x {num_microbatches} microbatches" if num_microbatches > 1 else "")
        fix = f"use {parts} samples or more" if joined else f"use a multiple of {parts}"
        raise ShapeError(
            Problem("indivisible-batch", f"{name} of {count} samples cannot be split over {over}", fix=fix)
        )


@dataclass(frozen=True)
class RowCosts:
    """What a row costs to compute: for each token, and in attention for each pair of tokens of a document.

    `explain(..., record=...)` finds both for a model (`Explanation.balance.row_costs`).

    Attributes:
        token: operations for a token of a row. pair: for a squared token of a document.
    """

    token: float
    pair: float

    def of(self, lengths: Sequence[int]) -> list[float]:
        """The costs of rows with one document. lengths: its tokens, for each row."""
        return [self.token * length + self.pair * length * length for length in lengths]

    def of_rows(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The costs of rows with several documents. rows: for each, the tokens of its documents."""
        return [sum(self.of(lengths)) for lengths in rows]


def checked_costs(costs: Sequence[float], num_samples: int) -> list[float]:
    """Raises: DataError `bad-costs` if there is not one positive number for each sample."""
    values = [float(cost) for cost in costs]
    wrong = [f"{n}: {value}" for n, value in enumerate(values) if not 0 < value < float("inf")]
    if len(values) != num_samples or wrong:
        what = f"there are {len(values)} costs of {num_samples} samples" + (
            f", {short_list(wrong, 4)}" if wrong else ""
        )
        fix = "a positive number for each sample: its tokens, or RowCosts(...).of(lengths)"
        raise DataError(Problem("bad-costs", what, fix=fix))
    return values
