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
        launches: ops that the host launches for a layer. by_expert: whether the matmuls of experts are launched one
            expert after another, and not by one kernel for all of them.
        adds_gradients: whether the matmul of a weight's gradient adds it to those of earlier microbatches itself.
        flash_2: whether attention is FlashAttention 2 (or that of `SDPBackend.FLASH_ATTENTION`) on every GPU, and not
            a kernel that was written for the GPU.
        constants_of: "attention", "elements" or "host" -> the set whose fitted constant it has.
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
    by_expert: bool
    adds_gradients: bool
    flash_2: bool
    constants_of: Mapping[str, str]

    def fitted(self, kind: str) -> str:
        """The set that a constant of some kind is named after."""
        return self.constants_of.get(kind, self.name)

    @property
    def attention(self) -> tuple[float, float]:
        """The rate of attention over that of large matmuls, in forward and in backward."""
        name = self.fitted("attention")
        return constant(f"attention.{name}.forward"), constant(f"attention.{name}.backward")

    @property
    def host(self) -> float:
        """The time of a launch on the host, over that of an op of PyTorch (`kernel_us` of a hardware profile)."""
        return constant(f"host.{self.fitted('host')}")

    @property
    def grouped(self) -> float:
        """Launches of each expert's matmul."""
        return constant("grouped") if self.by_expert else 0.0

    @property
    def elements(self) -> float:
        """The time of ops that only move memory, over that of their bytes at the bandwidth that large copies reach."""
        return constant(f"elements.{self.fitted('elements')}")

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
        by_expert=bool(values.get("by_expert")),
        adds_gradients=bool(values.get("adds_gradients")),
        flash_2=bool(values.get("flash_2")),
        constants_of=values.get("constants_of", {}),
    )
