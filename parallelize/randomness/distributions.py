"""What a parameter is drawn from: a value for each random key and global element index.

Each distribution draws in float64 and rounds once to the parameter's dtype, so that the bfloat16 weights of a seed are
its float32 weights, rounded. Scaling and shifting give a distribution of the same kind, as initialisers do it in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from parallelize.errors import ModelError, Problem
from parallelize.randomness.counter import Key, open_uniform, uniform
from parallelize.randomness.normal import inverse_normal


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def draw(self, where: Key, index: torch.Tensor) -> torch.Tensor:
        return torch.full(index.shape, self.value, dtype=torch.float64, device=index.device)

    def affine(self, scale: float, shift: float) -> Constant:
        return Constant(self.value * scale + shift)


@dataclass(frozen=True)
class Uniform:
    """Between `low` and `high`."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _need(self.low <= self.high, f"Uniform({self.low}, {self.high})", "low <= high")

    def draw(self, where: Key, index: torch.Tensor) -> torch.Tensor:
        return uniform(where, index).mul_(self.high - self.low).add_(self.low)

    def affine(self, scale: float, shift: float) -> Uniform:
        ends = sorted((self.low * scale + shift, self.high * scale + shift))
        return Uniform(*ends)


@dataclass(frozen=True)
class Normal:
    """With this mean and standard deviation: `Normal(0.0, 0.02)`."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _need(self.std >= 0.0, f"Normal({self.mean}, {self.std})", "a standard deviation that is not negative")

    def draw(self, where: Key, index: torch.Tensor) -> torch.Tensor:
        return inverse_normal(open_uniform(where, index)).mul_(self.std).add_(self.mean)

    def affine(self, scale: float, shift: float) -> Normal:
        return Normal(self.mean * scale + shift, self.std * abs(scale))


@dataclass(frozen=True)
class TruncatedNormal:
    """A normal distribution without what lies below `low` or above `high` (values, not standard deviations)."""

    mean: float = 0.0
    std: float = 1.0
    low: float = -2.0
    high: float = 2.0

    def __post_init__(self) -> None:
        _need(self.std > 0.0 and self.low < self.high, str(self), "a positive standard deviation, and low < high")
        _need(self._chance() > 1e-12, str(self), "bounds that the normal distribution reaches")

    def _below(self, x: float) -> float:
        return math.erfc((self.mean - x) / self.std / math.sqrt(2.0)) / 2.0

    def _chance(self) -> float:
        return self._below(self.high) - self._below(self.low)

    def draw(self, where: Key, index: torch.Tensor) -> torch.Tensor:
        u = open_uniform(where, index).mul_(self._chance()).add_(self._below(self.low))
        u.clamp_(2.0**-54, 1.0 - 2.0**-53)
        return inverse_normal(u).mul_(self.std).add_(self.mean).clamp_(self.low, self.high)

    def affine(self, scale: float, shift: float) -> TruncatedNormal | Constant:
        if scale == 0.0:
            return Constant(shift)
        ends = sorted((self.low * scale + shift, self.high * scale + shift))
        return TruncatedNormal(self.mean * scale + shift, self.std * abs(scale), *ends)


Distribution = Constant | Uniform | Normal | TruncatedNormal


def kaiming_uniform(fan_in: int, a: float = math.sqrt(5.0)) -> Uniform:
    """What `nn.Linear` takes for its weight: within gain / sqrt(fan in / 3), of the leaky gain sqrt(2 / (1 + a^2))."""
    bound = math.sqrt(3.0) * math.sqrt(2.0 / (1.0 + a * a)) / math.sqrt(fan_in)
    return Uniform(-bound, bound)


def xavier_uniform(fan_in: int, fan_out: int, gain: float = 1.0) -> Uniform:
    """Glorot's: within gain sqrt(6 / (fan in + fan out))."""
    bound = gain * math.sqrt(6.0 / (fan_in + fan_out))
    return Uniform(-bound, bound)


def xavier_normal(fan_in: int, fan_out: int, gain: float = 1.0) -> Normal:
    """Glorot's, normal: standard deviation gain sqrt(2 / (fan in + fan out))."""
    return Normal(0.0, gain * math.sqrt(2.0 / (fan_in + fan_out)))


def _need(true: bool, what: str, wanted: str) -> None:
    if not true:
        raise ModelError(Problem("bad-distribution", f"{what} is no distribution", fix=f"give {wanted}"))
