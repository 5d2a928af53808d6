"""Scores of predicted rows: errors, order of layouts, verdicts, coverage, each with its n and a bootstrap interval."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.blind_rows import Case

ROUNDS = 400  # of the bootstrap
Pair = tuple[float, float]


@dataclass(frozen=True)
class Predicted:
    """A case with its prediction. interval_s: of the time, for 90% of such rows. row_s: what predicting it took.

    fits: the verdict. first: whether it is the first row of its model, which imports and describes it.
    """

    case: Case
    step_s: float
    interval_s: Pair
    peak_bytes: float
    fits: bool
    row_s: float
    first: bool

    @property
    def error(self) -> float | None:
        """The logarithm of predicted over measured seconds."""
        return math.log(self.step_s / self.case.measured_s) if self.case.measured_s else None


def score(rows: Sequence[Predicted]) -> dict[str, Any]:
    """All figures of some rows. Those that nothing was measured for are None."""
    timed = [row for row in rows if row.error is not None]
    sizes = [abs(row.error) for row in timed]
    peaks = [row for row in rows if row.case.peak_bytes and row.case.ran]
    groups = [group for group in _groups(timed) if len(group) >= 3]
    regrets = [_regret(group) for group in _groups(timed) if len(group) >= 2]
    ran, out = [row for row in rows if row.case.ran], [row for row in rows if not row.case.ran]
    return {
        "rows": len(rows),
        "timed": len(timed),
        "median": figure(sizes, statistics.median),
        "p90": figure(sizes, lambda values: quantile(values, 0.9)),
        "bias": figure([row.error for row in timed], statistics.median),
        "tau": figure([_tau(group) for group in groups], statistics.mean),
        "groups": len(groups),
        "regret_median": figure(regrets, statistics.median),
        "regret_most": figure(regrets, max),
        "ran_said_out": _share([not row.fits for row in ran]),
        "out_said_out": _share([not row.fits for row in out]),
        "verdicts": {
            "ran, fits": sum(row.fits for row in ran),
            "ran, said not to fit": sum(not row.fits for row in ran),
            "out of memory, said to fit": sum(row.fits for row in out),
            "out of memory, said not to fit": sum(not row.fits for row in out),
        },
        "peak_median": figure(
            [abs(math.log(row.peak_bytes / row.case.peak_bytes)) for row in peaks], statistics.median
        ),
        "peaks": len(peaks),
        "coverage": _share([_covers(row) for row in timed]),
    }


def by_source(rows: Iterable[Predicted]) -> Mapping[str, list[Predicted]]:
    """Rows of each source, and of each kind beside dense ones of 16 bits."""
    sources: dict[str, list[Predicted]] = defaultdict(list)
    for row in rows:
        kind = row.case.kind
        sources[row.case.source if kind == "dense" else f"{row.case.source} ({kind})"].append(row)
    return sources


def quantile(values: Sequence[float], level: float) -> float:
    """The smallest value that at least `level` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(level * len(ordered)) - 1))]


def figure(values: Sequence[Any], of: Callable[[Sequence[Any]], float]) -> dict[str, Any] | None:
    """A statistic with n and its 90% bootstrap interval; None of nothing."""
    if not values:
        return None
    draw = random.Random(0)
    drawn = [of(draw.choices(values, k=len(values))) for _ in range(ROUNDS)]
    return {"value": of(values), "n": len(values), "low": quantile(drawn, 0.05), "high": quantile(drawn, 0.95)}


def _share(values: Sequence[bool]) -> dict[str, Any] | None:
    return figure([float(value) for value in values], statistics.mean)


def _covers(row: Predicted) -> bool:
    low, high = row.interval_s
    return row.case.measured_s is not None and low <= row.case.measured_s <= high


def _groups(rows: Iterable[Predicted]) -> list[list[Predicted]]:
    groups: dict[tuple, list[Predicted]] = defaultdict(list)
    for row in rows:
        groups[row.case.group].append(row)
    return list(groups.values())


def _tau(group: Sequence[Predicted]) -> float:
    """Kendall's tau of predicted and measured times. Source: Kendall, Biometrika 30, 1938 (tau-a; ties count 0)."""
    pairs = [(a, b) for index, a in enumerate(group) for b in group[index + 1 :]]
    signs = (_sign(a.step_s - b.step_s) * _sign(_measured(a) - _measured(b)) for a, b in pairs)
    return sum(signs) / len(pairs)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _measured(row: Predicted) -> float:
    return row.case.measured_s or math.inf


def _regret(group: Sequence[Predicted]) -> float:
    """How much longer the layout that is ranked first takes than the best one."""
    chosen = min(group, key=lambda row: row.step_s)
    return _measured(chosen) / min(map(_measured, group)) - 1
