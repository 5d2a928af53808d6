"""Fits the constants of estimates to measured rows, and says what fixed each.

    python -m benchmarks.calibrate ROWS.csv LINKS.csv [--write] [--leave-out source|group]

Each constant has a physical meaning, an assumption that it starts from (`prior`), and how far from it rows may move it
(`spread`, of its logarithm). The fit minimizes the squared logarithms of estimated over measured step times, of link
rates and of start-ups, weighted by source so that a source of many rows does not decide alone, and large residuals
linearly (Huber, 1964). `--leave-out` scores rows by constants that were fitted without their source, or without their
(model, GPUs).
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.blind_rows import Case, cases, forget_machines, machine_of, read_rows
from benchmarks.blind_score import figure, quantile
from benchmarks.record import write_record
from parallelize.tools.analysis.cost.machine import Placement
from parallelize.tools.analysis.cost.memory import RankMemory
from parallelize.tools.analysis.cost.training_step import RankStep
from parallelize.tools.analysis.measure import measure_memory, measure_time
from parallelize.tools.analysis.outline.outlined import OutlinedSubject
from parallelize.tools.analysis.record.constants import FILE, constants, trying
from parallelize.tools.analysis.record.kernel_sets import kernel_set

HUBER = 0.12  # residuals of the logarithm beyond which weights fall
LARGEST = 2.0**30  # bytes of the messages of which links' rates were measured
STEP = 0.02  # of a logarithm, for derivatives
NOTHING = np.empty(0)
NOISE = 0.05  # of one row, against which the spreads of the constants are weighed
NOT_FITTED = (
    "reserve_gb",
    "fragmentation",
    "fragmentation_limit",
    "interval",
    "narrow",
    "grouped",
)  # of memory, of errors, and of what is counted once


@dataclass
class Prepared:
    """A case with all that does not depend on constants."""

    case: Case
    subject: OutlinedSubject
    steps: list[RankStep]
    memories: list[RankMemory]
    weight: float = 1.0

    def residual(self) -> float:
        """The logarithm of estimated over measured seconds."""
        machine = machine_of(self.case.row)
        time = measure_time(self.subject, self.case.setting, machine, self.steps, self.memories, simulated=False)
        assert self.case.measured_s is not None
        return math.log(time.step_s / self.case.measured_s)


def prepared(every: Iterable[Case]) -> list[Prepared]:
    """Cases whose time was measured."""
    subjects: dict = {}
    found = []
    for case in every:
        if case.measured_s is None:
            continue
        subject = subjects.setdefault(case.decoder, OutlinedSubject(case.decoder))
        steps, memories = measure_memory(subject, case.setting, by_segment=False, walks=False)
        found.append(Prepared(case, subject, steps, memories))
    counts = Counter(row.case.source for row in found)
    for row in found:
        row.weight = counts[row.case.source] ** -0.25
    return found


@dataclass(frozen=True)
class LinkRow:
    """A measured collective: gathered bytes over time in GB/s, and what its start-up is over that of the smallest group
    with the same op, in microseconds. (All of them have the start-up of the script that measured them.)"""

    op: str
    placement: Placement
    rate: float
    start_up_us: float

    def residuals(self) -> tuple[float, float]:
        """(of the rate, of the start-up)."""
        machine, ranks = machine_of({"gpu": "h100"}), self.placement.ranks
        share = (ranks - 1) / ranks * (2 if self.op == "all_reduce" else 1)
        seconds = machine.messages_s(self.op, self.placement, LARGEST * share, 1)
        of_start = 0.0
        if self.start_up_us > 50:
            smallest = machine.messages_s(self.op, Placement(2, 1), 0, 1)
            grown_us = (machine.messages_s(self.op, self.placement, 0, 1) - smallest) * 1e6
            of_start = 0.3 * math.log(max(grown_us, 1.0) / self.start_up_us)
        return math.log(self.rate * 1e9 * seconds / LARGEST), of_start


def link_rows(path: Path) -> list[LinkRow]:
    with path.open(encoding="utf-8", newline="") as file:
        raw = list(csv.DictReader(file))
    least: dict[str, float] = {}
    for row in raw:
        least[row["op"]] = min(least.get(row["op"], math.inf), float(row["measured_startup_us"]))
    return [
        LinkRow(
            row["op"],
            Placement(int(row["ranks"]), int(row["ranks_per_node"])),
            float(row["measured_peak_algbw_gb_s"]),
            float(row["measured_startup_us"]) - least[row["op"]],
        )
        for row in raw
    ]


# -- the fit ----------------------------------------------------------------------------------------------------------


def _depends(row: Prepared, name: str) -> bool:
    """Whether a row's time may change with a constant."""
    if "." not in name:
        return True
    kind, of = name.split(".")[:2]
    kernels, generation = kernel_set(row.case.setting.kernels), "a100" if "A100" in row.case.machine.name else "h100"
    if kind == "contention":
        return of != "tp" or row.case.setting.overlap != "off"
    if kind in ("attention", "elements", "host"):
        return of == kernels.fitted(kind)
    return of in (row.case.setting.training_system.fitted, generation)


def names_of(rows: Sequence[Prepared]) -> list[str]:
    """Constants that some row depends on."""
    fitted = [name for name in constants() if name.partition(".")[0] not in NOT_FITTED]
    return [name for name in fitted if any(_depends(row, name) for row in rows)]


@dataclass(frozen=True)
class Fit:
    """Values of constants. told: of each, the part of its assumed variance that the rows took away."""

    values: dict[str, float]
    told: dict[str, float]


def fit(rows: Sequence[Prepared], links: Sequence[LinkRow], rounds: int = 8) -> Fit:
    """Values of the constants that the rows depend on."""
    names = names_of(rows)
    priors = np.array([math.log(constants()[name].prior) for name in names])
    spreads = np.array([constants()[name].spread for name in names]) / NOISE
    x, damping = np.array([math.log(constants()[name].value) for name in names]), 0.1
    weights = np.concatenate([[row.weight for row in rows], np.full(2 * len(links), 0.4)])

    def values(point: np.ndarray) -> dict[str, float]:
        return {name: _bounded(name, math.exp(value)) for name, value in zip(names, point, strict=True)}

    def residuals(point: np.ndarray, known: np.ndarray = NOTHING, moved: str = "") -> np.ndarray:
        return _residuals(rows, links, values(point), known, moved)

    def loss(found: np.ndarray, point: np.ndarray) -> float:
        size = np.abs(found)
        huber = np.where(size < HUBER, found**2, 2 * HUBER * size - HUBER**2)
        return float((weights * huber).sum() + (((point - priors) / spreads) ** 2).sum())

    now = residuals(x)
    best = loss(now, x)
    for _ in range(rounds):
        columns = [residuals(x + STEP * (np.arange(len(x)) == n), now, name) - now for n, name in enumerate(names)]
        jacobian = np.stack(columns, axis=1) / STEP
        robust = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(now), 1e-9))
        normal = jacobian.T @ (robust[:, None] * jacobian) + np.diag(spreads**-2.0)
        slope = jacobian.T @ (robust * now) + (x - priors) / spreads**2
        for _ in range(6):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope)
            tried = x - np.clip(step, -0.4, 0.4)
            found = residuals(tried)
            if (value := loss(found, tried)) < best:
                gain, best, x, now, damping = best - value, value, tried, found, damping / 3
                break
            damping *= 4
        else:
            break
        if gain < 1e-4 * best:
            break
    told = 1 - np.diag(np.linalg.inv(normal)) / spreads**2
    return Fit(values(x), dict(zip(names, map(float, told), strict=True)))


def _bounded(name: str, value: float) -> float:
    return (
        min(value, 1.0)
        if name.startswith(("hidden", "matmul.", "memory.", "inside.", "between")) and "_us" not in name
        else value
    )


def _residuals(
    rows: Sequence[Prepared], links: Sequence[LinkRow], values: Mapping[str, float], known: np.ndarray, moved: str = ""
) -> np.ndarray:
    """moved: the constant by which `values` differ from those of `known`: rows that do not depend on it keep theirs."""
    with trying(values):
        forget_machines()
        found = [
            row.residual() if not moved or _depends(row, moved) else known[index] for index, row in enumerate(rows)
        ]
        found += [residual for link in links for residual in link.residuals()]
    forget_machines()
    return np.array(found)


# -- leaving out ------------------------------------------------------------------------------------------------------


def left_out(rows: Sequence[Prepared], links: Sequence[LinkRow], by: str, folds: int = 5) -> dict[str, float]:
    """Row number -> its residual by constants that were fitted without its source, or without its (model, GPUs).

    Args:
        by: "source", or "group": groups are dealt to `folds` parts, each of which is left out once.
    """
    keys = sorted({_key(row, by) for row in rows})
    parts = [{key} for key in keys] if by == "source" else [set(keys[start::folds]) for start in range(folds)]
    found: dict[str, float] = {}
    for part in parts:
        kept, apart = ([row for row in rows if (_key(row, by) in part) is is_out] for is_out in (False, True))
        values = fit(kept, links).values
        residuals = _residuals(apart, (), values, NOTHING)
        found.update({row.case.number: float(value) for row, value in zip(apart, residuals, strict=True)})
    return found


def _key(row: Prepared, by: str) -> tuple[str, ...]:
    case = row.case
    return (case.source,) if by == "source" else (case.source, case.model, str(case.setting.mesh.world_size))


def conformal(residuals: Mapping[str, float], rows: Sequence[Prepared], kind: str) -> tuple[float, float]:
    """(below, above): how far measured times are below and above estimates, in logarithms, for 90% of rows, sources
    weighed alike."""
    of_kind = [row for row in rows if row.case.kind == kind and row.case.number in residuals]
    counts = Counter(row.case.source for row in of_kind)

    def bound(sign: int) -> float:
        ordered = sorted((sign * residuals[row.case.number], 1 / counts[row.case.source]) for row in of_kind)
        total = sum(weight for _, weight in ordered)
        seen = 0.0
        for value, weight in ordered:
            seen += weight
            if seen >= 0.95 * total:
                return max(value, 0.02)
        return max(ordered[-1][0], 0.02)

    return bound(1), bound(-1)


# -- the file ---------------------------------------------------------------------------------------------------------


def fixed_by(name: str, rows: Sequence[Prepared], told: float) -> str:
    """What fixed a constant, as text."""
    if told < 0.1:
        return "assumption: the rows do not say"
    counts = Counter(row.case.source for row in rows if _depends(row, name))
    sources = ", ".join(
        f"{count} of {source.split(' (')[0].split(' et al')[0]}" for source, count in counts.most_common(3)
    )
    return f"{sum(counts.values())} step times ({sources}); {told:.0%} of the assumed variance is gone"


def write(values: Mapping[str, float], reasons: Mapping[str, str]) -> None:
    """Into `constants.yaml`; constants without a value here keep theirs."""
    head = FILE.read_text(encoding="utf-8").partition("\n")[0]
    lines = [head]
    for name, row in constants().items():
        value, reason = values.get(name, row.value), reasons.get(name, row.fixed_by)
        lines.append(
            f'{name}: {{value: {value:.4g}, prior: {row.prior:g}, spread: {row.spread:g}, fixed_by: "{reason}"}}'
        )
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    constants.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("links", type=Path)
    parser.add_argument("--write", action="store_true", help="write constants.yaml")
    parser.add_argument("--leave-out", choices=("source", "group"), help="also score rows that were not fitted on")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = prepared(case for _, case in cases(read_rows(args.rows)) if not isinstance(case, str))
    links = link_rows(args.links)
    result: dict[str, Any] = {}
    if args.leave_out:
        residuals = left_out(rows, links, args.leave_out)
        result["left_out"] = residuals
        intervals: dict[str, float] = {}
        for kind in ("dense", "mixture"):
            if len({row.case.source for row in rows if row.case.kind == kind}) > 1:  # one source says nothing of others
                below, above = conformal(residuals, rows, kind)
                intervals |= {f"interval.{kind}.below": below, f"interval.{kind}.above": above}
        for line in _scores(rows, residuals):
            print(line)
        if args.write:
            reason = f"errors on rows of another {args.leave_out}, 90% of which it covers"
            write(intervals, dict.fromkeys(intervals, reason))
    else:
        found = fit(rows, links)
        for name, value in found.values.items():
            print(
                f"{name:<36} {constants()[name].prior:8.4g} -> {value:8.4g}  {fixed_by(name, rows, found.told[name])}"
            )
        for line in _scores(rows, _by_number(rows, found.values)):
            print(line)
        if args.write:
            write(found.values, {name: fixed_by(name, rows, found.told[name]) for name in found.values})
    write_record(args.json, result)


def _by_number(rows: Sequence[Prepared], values: Mapping[str, float]) -> dict[str, float]:
    residuals = _residuals(rows, (), values, NOTHING)
    return {row.case.number: float(value) for row, value in zip(rows, residuals, strict=True)}


def _scores(rows: Sequence[Prepared], residuals: Mapping[str, float]) -> list[str]:
    """A line for each source: n, median and 90th percentile of the error, each with its 90% bootstrap interval."""
    by_source: dict[str, list[float]] = {}
    for row in rows:
        if row.case.kind == "dense" and row.case.number in residuals:
            by_source.setdefault(row.case.source, []).append(abs(residuals[row.case.number]))
    lines = []
    for source, sizes in by_source.items():
        texts = []
        for name, level in (("median", 0.5), ("p90", 0.9)):
            found = figure(sizes, partial(quantile, level=level))
            assert found is not None
            texts.append(f"{name} {found['value']:.1%} ({found['low']:.1%} to {found['high']:.1%})")
        lines.append(f"{source[:50]:<50} {len(sizes):4d}  {'  '.join(texts)}")
    return lines


if __name__ == "__main__":
    main()
