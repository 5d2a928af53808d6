"""Which samples of a global batch a data rank and each of its microbatches get, so that all compute nearly as long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelize.base.errors import DataError, Problem, ShapeError, short_list
from parallelize.base.partition import balanced_parts

Deal = list[list[list[int]]]
"""By data rank, by microbatch: indices of samples in the global batch."""


def balanced_deal(costs: Sequence[float], data_ranks: int, num_microbatches: int = 1, *, joined: bool = False) -> Deal:
    """The samples of a global batch over data ranks and microbatches, so that the largest sum of costs is small.

    First data ranks are balanced, then the microbatches of each, which come in the order of their sums, so that the
    largest ones of all ranks run together. It is a function of its arguments alone: every rank computes the same.

    Args:
        costs: of the samples, positive, in any unit, such as `RowCosts` gives them.
        joined: any number of samples in a microbatch, one or more. False: as many in each.

    Raises: ShapeError `indivisible-batch` where there are too few samples, or, unless `joined`, not as many for each.
    """
    parts = data_ranks * num_microbatches
    check_count(len(costs), data_ranks, num_microbatches, joined)
    if not joined:
        ranks = balanced_parts(costs, data_ranks, equal=True)
        return [_within(rank, costs, num_microbatches, True) for rank in ranks]
    ranks = balanced_parts(costs, data_ranks)
    if min(len(rank) for rank in ranks) >= num_microbatches:
        return [_within(rank, costs, num_microbatches, False) for rank in ranks]
    microbatches = balanced_parts(costs, parts)  # of few samples: each microbatch needs one
    sums = [sum(costs[n] for n in part) for part in microbatches]
    return [[microbatches[n] for n in rank] for rank in balanced_parts(sums, data_ranks, equal=True)]


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
    """What a row costs to compute: a part for each token, and in attention a part for each pair of tokens of a document.

    `explain(..., lengths=...)` finds both for a model (`Explanation.balance.row_costs`).

    Attributes:
        token: operations for a token of a row. pair: for a squared token of a document.
    """

    token: float
    pair: float

    def of(self, lengths: Sequence[int]) -> list[float]:
        """The cost of a row with one document of each length."""
        return [self.token * length + self.pair * length * length for length in lengths]

    def of_rows(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The cost of rows with several documents: the lengths of each."""
        return [sum(self.of(lengths)) for lengths in rows]


def checked_costs(costs: Sequence[float], num_samples: int) -> list[float]:
    """Raises: DataError `bad-costs` if there is not one positive number for each sample."""
    values = [float(cost) for cost in costs]
    wrong = [f"{n}: {value}" for n, value in enumerate(values) if not 0 < value < float("inf")]
    if len(values) != num_samples or wrong:
        what = f"there are {len(values)} costs of {num_samples} samples" + (f", {short_list(wrong, 4)}" if wrong else "")
        fix = "a positive number for each sample: its tokens, or RowCosts(...).of(lengths)"
        raise DataError(Problem("bad-costs", what, fix=fix))
    return values
