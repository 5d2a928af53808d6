"""One row of docs/measurements.md, and its tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Figures = Callable[[Any], list[Any]]
"""The numbers of a claim in the result of a record, in the order of its text; a ratio with an interval is a dict."""


@dataclass(frozen=True)
class Claim:
    """One row of a table.

    Attributes:
        section: the table. text: what was compared; several figures are separated by `/` in it, as in `measured`.
        record: the name of the run. figures: from its result.
        unit: after the figures.
    """

    section: str
    text: str
    record: str
    figures: Figures
    unit: str = "times"


STEP, GPU, WEIGHTS, CHECKS = "step", "gpu", "weights", "checks"
"""The tables."""
