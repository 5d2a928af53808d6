"""Sets of kernels by name: what each part of a layer reads, writes and keeps for backward under each. Torch-free.

The same model takes twice the memory, and half again the time between matmuls, where its norms, activations and losses
are many small ops instead of one kernel each. `kernel_sets.yaml` says for each set how many bytes are moved and kept
for an element of what flows through a part, and how many ops the host launches for a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from parallelize.tools.analysis.record.constants import constant

_FILE = Path(__file__).with_suffix(".yaml")


class Traffic(NamedTuple):
    """Bytes for one element of what a part computes: moved in forward and in backward, and kept between them.

    peak: allocated at once beside what is kept, while the part runs.
    """

    forward: float
    backward: float
    kept: float = 0.0
    peak: float = 0.0


class Launches(NamedTuple):
    """Ops that the host launches for one layer."""

    forward: float
    backward: float


@dataclass(frozen=True)
class KernelSet:
    """One set.

    Attributes:
        norm, residual, rotary: for each element of the hidden state, or of queries and keys.
        gated, plain: the activation, for each element of the feed-forward width.
        scores: attention that has its scores in memory, for each of them; zeros: a fused kernel.
        logits: the loss, for each logit.
        dropout: bytes kept for masks, for each element of the hidden state.
        launches: ops that the host launches for a layer.
    """

    name: str
    title: str
    norm: Traffic
    residual: Traffic
    rotary: Traffic
    gated: Traffic
    plain: Traffic
    scores: Traffic
    logits: Traffic
    dropout: float
    launches: Launches

    @property
    def attention(self) -> tuple[float, float]:
        """The rate of attention over that of large matmuls, in forward and in backward."""
        return constant(f"attention.{self.name}.forward"), constant(f"attention.{self.name}.backward")

    @property
    def host(self) -> float:
        """The time of a launch on the host, over that of an op of PyTorch (`kernel_us` of a hardware profile)."""
        return constant(f"host.{self.name}")

    @property
    def elements(self) -> float:
        """The time of ops that only move memory, over that of their bytes at the bandwidth that large copies reach."""
        return constant(f"elements.{self.name}")

    @property
    def has_scores(self) -> bool:
        """Whether attention has all of its scores in memory."""
        return self.scores.forward > 0


def kernel_set(name: str) -> KernelSet:
    """A set by one of the names of `known_kernels`."""
    return _all()[name]


def known_kernels() -> tuple[str, ...]:
    """Names of all sets."""
    return tuple(_all())


@lru_cache(maxsize=1)
def _all() -> Mapping[str, KernelSet]:
    raw = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {name: _set(name, values) for name, values in raw.items()}


def _set(name: str, values: Mapping[str, Any]) -> KernelSet:
    def traffic(part: str) -> Traffic:
        return Traffic(*map(float, values[part]))

    return KernelSet(
        name=name,
        title=values["title"],
        norm=traffic("norm"),
        residual=traffic("residual"),
        rotary=traffic("rotary"),
        gated=traffic("gated"),
        plain=traffic("plain"),
        scores=traffic("scores"),
        logits=traffic("logits"),
        dropout=float(values["dropout"]),
        launches=Launches(*map(float, values["launches"])),
    )
