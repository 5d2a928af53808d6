"""Distributions of parameters: a value for each random key and global element index.

Each distribution draws in float64 and rounds once to the parameter's dtype, so the bfloat16 weights of a seed are its
float32 weights, rounded. Scaling and shifting, which initializers do in place, give a distribution of the same kind.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.ops.random.counter import Key, inverse_normal, open_uniform, uniform


@dataclass(frozen=True)
class Constant:
    """The same value for every element.

    Args:
        value: the value.
    """

    value: float

    def draw(self, key: Key, index: torch.Tensor) -> torch.Tensor:
        """A float64 value of the distribution for each element.

        Args:
            key: the random key of the parameter.
            index: int64 global indices of the elements, of any shape. They may be overwritten.

        Returns: a float64 tensor of the shape of `index`, on its device.
        """
        return torch.full(index.shape, self.value, dtype=torch.float64, device=index.device)

    def affine(self, scale: float, shift: float) -> Constant:
        """The distribution of `scale * x + shift`, where x has this distribution."""
        return Constant(self.value * scale + shift)


@dataclass(frozen=True)
class Uniform:
    """Uniform between `low` and `high`.

    Args:
        low, high: the bounds; `high` is excluded.

    Raises: ModelError `bad-distribution` unless low <= high.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _need(self.low <= self.high, f"Uniform({self.low}, {self.high})", "low <= high")

    def draw(self, key: Key, index: torch.Tensor) -> torch.Tensor:
        """A float64 value of the distribution for each element.

        Args:
            key: the random key of the parameter.
            index: int64 global indices of the elements, of any shape. They may be overwritten.

        Returns: a float64 tensor of the shape of `index`, on its device.
        """
        return uniform(key, index).mul_(self.high - self.low).add_(self.low)

    def affine(self, scale: float, shift: float) -> Uniform:
        """The distribution of `scale * x + shift`, where x has this distribution."""
        ends = sorted((self.low * scale + shift, self.high * scale + shift))
        return Uniform(*ends)


@dataclass(frozen=True)
class Normal:
    """Normal: `Normal(0.0, 0.02)`.

    Args:
        mean: the mean.
        std: the standard deviation.

    Raises: ModelError `bad-distribution` for a negative standard deviation.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _need(self.std >= 0.0, f"Normal({self.mean}, {self.std})", "a standard deviation that is not negative")

    def draw(self, key: Key, index: torch.Tensor) -> torch.Tensor:
        """A float64 value of the distribution for each element.

        Args:
            key: the random key of the parameter.
            index: int64 global indices of the elements, of any shape. They may be overwritten.

        Returns: a float64 tensor of the shape of `index`, on its device.
        """
        return inverse_normal(open_uniform(key, index)).mul_(self.std).add_(self.mean)

    def affine(self, scale: float, shift: float) -> Normal:
        """The distribution of `scale * x + shift`, where x has this distribution."""
        return Normal(self.mean * scale + shift, self.std * abs(scale))


@dataclass(frozen=True)
class TruncatedNormal:
    """A normal distribution restricted to values between `low` and `high`.

    Args:
        mean, std: mean and standard deviation of the normal distribution before truncation.
        low, high: the bounds, as values and not as standard deviations.

    Raises: ModelError `bad-distribution` unless std > 0, low < high and the interval has a probability above 1e-12.
    """

    mean: float = 0.0
    std: float = 1.0
    low: float = -2.0
    high: float = 2.0

    def __post_init__(self) -> None:
        _need(self.std > 0.0 and self.low < self.high, str(self), "a positive standard deviation, and low < high")
        _need(self._probability() > 1e-12, str(self), "bounds with a probability above 1e-12")

    def _probability_below(self, x: float) -> float:
        return math.erfc((self.mean - x) / self.std / math.sqrt(2.0)) / 2.0

    def _probability(self) -> float:
        return self._probability_below(self.high) - self._probability_below(self.low)

    def draw(self, key: Key, index: torch.Tensor) -> torch.Tensor:
        """A float64 value of the distribution for each element.

        Args:
            key: the random key of the parameter.
            index: int64 global indices of the elements, of any shape. They may be overwritten.

        Returns: a float64 tensor of the shape of `index`, on its device.
        """
        u = open_uniform(key, index).mul_(self._probability()).add_(self._probability_below(self.low))
        u.clamp_(2.0**-54, 1.0 - 2.0**-53)
        return inverse_normal(u).mul_(self.std).add_(self.mean).clamp_(self.low, self.high)

    def affine(self, scale: float, shift: float) -> TruncatedNormal | Constant:
        """The distribution of `scale * x + shift`, where x has this distribution. A `Constant` if `scale` is 0."""
        if scale == 0.0:
            return Constant(shift)
        ends = sorted((self.low * scale + shift, self.high * scale + shift))
        return TruncatedNormal(self.mean * scale + shift, self.std * abs(scale), *ends)


Distribution = Constant | Uniform | Normal | TruncatedNormal


def kaiming_uniform(fan_in: int, a: float = math.sqrt(5.0)) -> Uniform:
    """The default of `nn.Linear` weights: bound gain * sqrt(3 / fan_in), with the gain sqrt(2 / (1 + a^2)) of leaky
    ReLU."""
    bound = math.sqrt(3.0) * math.sqrt(2.0 / (1.0 + a * a)) / math.sqrt(fan_in)
    return Uniform(-bound, bound)


def xavier_uniform(fan_in: int, fan_out: int, gain: float = 1.0) -> Uniform:
    """Glorot, uniform: bound gain * sqrt(6 / (fan_in + fan_out))."""
    bound = gain * math.sqrt(6.0 / (fan_in + fan_out))
    return Uniform(-bound, bound)


def xavier_normal(fan_in: int, fan_out: int, gain: float = 1.0) -> Normal:
    """Glorot, normal: standard deviation gain * sqrt(2 / (fan_in + fan_out))."""
    return Normal(0.0, gain * math.sqrt(2.0 / (fan_in + fan_out)))


def _need(condition: bool, what: str, requirement: str) -> None:
    if not condition:
        raise ModelError(Problem("bad-distribution", f"{what} is no distribution", fix=f"give {requirement}"))
