"""How far estimates of time are off: intervals from rows that were not fitted on. Torch-free.

Split conformal prediction: constants are fitted without a source, and the errors on its rows say how far estimates on
another's cluster are off. The interval of an estimate has the quantile of these errors that 90% of them do not exceed
(`constants.yaml` has it for each kind of row). Where a profile has no rows of its own GPU, the interval is wider, by an
assumption that is named there.

Source: Papadopoulos et al., Inductive Confidence Machines for Regression, ECML 2002.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from parallelize.tools.analysis.cost.machine import Machine
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.record.constants import constant

LEVEL = 0.9


class Interval(NamedTuple):
    """Between which values 90% of such rows are."""

    low: float
    high: float


def interval_of(seconds: float, setting: Setting, machine: Machine, *, has_experts: bool = False) -> Interval:
    """Of a step that was estimated to take `seconds`."""
    kind = "narrow" if setting.matmul_dtype else "mixture" if has_experts else "dense"
    times = constant("interval.not_scored") if machine.not_scored else 1.0
    below, above = (constant(f"interval.{kind}.{side}") * times for side in ("below", "above"))
    return Interval(seconds * math.exp(-below), seconds * math.exp(above))


def memory_interval(size: float) -> Interval:
    """Of a device's memory that was estimated to be `size` bytes."""
    below, above = (constant(f"interval.memory.{side}") for side in ("below", "above"))
    return Interval(size * math.exp(-below), size * math.exp(above))
