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
from pathlib import Path

import numpy as np

from benchmarks.blind_rows import Case, cases, forget_machines, machine_of, read_rows
from parallelize.tools.analysis.cost.machine import Placement
from parallelize.tools.analysis.cost.memory import RankMemory
from parallelize.tools.analysis.cost.training_step import RankStep
from parallelize.tools.analysis.measure import measure_memory, measure_time
from parallelize.tools.analysis.outline.subject import OutlinedSubject
from parallelize.tools.analysis.record.constants import FILE, constants, trying

HUBER = 0.12  # residuals of the logarithm beyond which weights fall
STEP = 0.02  # of a logarithm, for derivatives
NOISE = 0.05  # of one row, against which the spreads of the constants are weighed
NOT_FITTED = ("reserve_gb", "fragmentation", "interval")  # of memory, and of errors


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
        time = measure_time(
            self.subject, self.case.setting, machine, self.steps, self.memories, simulated=False
        )
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
        seconds = machine.messages_s(self.op, self.placement, 1e9 * share, 0)
        of_start = 0.0
        if self.start_up_us > 50:
            smallest = machine.messages_s(self.op, Placement(2, 1), 0, 1)
            grown_us = (machine.messages_s(self.op, self.placement, 0, 1) - smallest) * 1e6
            of_start = 0.3 * math.log(max(grown_us, 1.0) / self.start_up_us)
        return math.log(self.rate * seconds), of_start


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
    generation = "a100" if "A100" in row.case.machine.name else "h100"
    return name.split(".")[1] in (row.case.setting.kernels, row.case.setting.system, generation)


def names_of(rows: Sequence[Prepared]) -> list[str]:
    """Constants that some row depends on."""
    fitted = [name for name in constants() if name.partition(".")[0] not in NOT_FITTED]
    return [name for name in fitted if any(_depends(row, name) for row in rows)]


def fit(rows: Sequence[Prepared], links: Sequence[LinkRow], rounds: int = 12) -> dict[str, float]:
    """Values of the constants that the rows depend on."""
    names = names_of(rows)
    priors = np.array([math.log(constants()[name].prior) for name in names])
    spreads = np.array([constants()[name].spread for name in names]) / NOISE
    x, damping = np.array([math.log(constants()[name].value) for name in names]), 0.1
    weights = np.concatenate([[row.weight for row in rows], np.full(2 * len(links), 0.4)])

    def values(point: np.ndarray) -> dict[str, float]:
        return {name: _bounded(name, math.exp(value)) for name, value in zip(names, point, strict=True)}

    def residuals(point: np.ndarray, known: np.ndarray = np.empty(0), moved: str = "") -> np.ndarray:
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
    return values(x)


def _bounded(name: str, value: float) -> float:
    return min(value, 1.0) if name.startswith(("hidden", "matmul.", "memory.", "inside.", "between")) and "_us" not in name else value


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
