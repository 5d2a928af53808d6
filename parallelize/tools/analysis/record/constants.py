"""Constants of estimates that were fitted to measurements: one file, in which each says what fixed it. Torch-free.

A data sheet says what a GPU could do. What matmuls, attention, links and hosts reach of it is known from steps that
were measured; `constants.yaml` has these values, and `benchmarks/calibrate.py` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import yaml

FILE = Path(__file__).with_suffix(".yaml")


class FittedConstant(NamedTuple):
    """A value, and the rows that fixed it. prior, spread: what is assumed without rows, and its logarithm's spread."""

    value: float
    fixed_by: str
    prior: float
    spread: float


@lru_cache(maxsize=1)
def constants() -> Mapping[str, FittedConstant]:
    """All constants by name."""
    raw = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {
        name: FittedConstant(float(row["value"]), str(row["fixed_by"]), float(row["prior"]), float(row["spread"]))
        for name, row in raw.items()
    }


_tried: dict[str, float] = {}


def constant(name: str) -> float:
    """The value of a constant."""
    return _tried[name] if name in _tried else constants()[name].value


@contextmanager
def trying(values: Mapping[str, float]) -> Iterator[None]:
    """Within the block, these values are the constants': for the script that fits them."""
    before = dict(_tried)
    _tried.update(values)
    try:
        yield
    finally:
        _tried.clear()
        _tried.update(before)
