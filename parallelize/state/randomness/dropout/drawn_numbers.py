"""What PyTorch's random operations draw, as functions of random bits: by operation, the numbers for a block of
elements.

Each number is computed in float64 and rounded once. A block is int64 global indices, which are overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from parallelize.ops.random.counter import Key, bits, inverse_normal, log, open_uniform, uniform

T = torch.Tensor
Draw = Callable[[Key, T], T]
"""(key, global indices) -> numbers of the same shape."""


def uniform_of(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Draw:
    """In [low, high); of a dtype in half precision with as many bits as it stores, so that none is rounded up to
    `high`."""
    count = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}.get(dtype, 53)

    def draw(key: Key, index: T) -> T:
        u = uniform(key, index)
        if count < 53:
            u = u.mul_(2.0**count).floor_().mul_(2.0**-count)
        return u.mul_(high - low).add_(low)

    return draw


def normal_of(mean: float = 0.0, std: float = 1.0) -> Draw:
    return lambda key, index: inverse_normal(open_uniform(key, index)).mul_(std).add_(mean)


def exponential_of(rate: float = 1.0) -> Draw:
    return lambda key, index: log(open_uniform(key, index)).div_(-rate)


def below(p: float) -> Draw:
    """True with probability p."""
    return lambda key, index: uniform(key, index) < p


def geometric_of(p: float) -> Draw:
    return lambda key, index: (
        log(open_uniform(key, index)).div_(math.log1p(-p) if p < 1.0 else -math.inf).ceil_().clamp_(min=1.0)
    )


def cauchy_of(median: float = 0.0, sigma: float = 1.0) -> Draw:
    return lambda key, index: open_uniform(key, index).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)


def log_normal_of(mean: float = 1.0, std: float = 2.0) -> Draw:
    normal = normal_of(mean, std)
    return lambda key, index: normal(key, index).exp_()


def integers(low: int, high: int) -> Draw:
    """In [low, high)."""
    return lambda key, index: (
        bits(key, index).bitwise_right_shift_(1).bitwise_and_(2**62 - 1).remainder_(high - low).add_(low)
    )


def integers_of(dtype: torch.dtype) -> Draw:
    """All that `random_()` draws for a dtype: for floating point those that it stores exactly."""
    if dtype.is_floating_point:
        return integers(0, 2 ** {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}.get(dtype, 53) + 1)
    return integers(0, 2 if dtype == torch.bool else min(torch.iinfo(dtype).max, 2**62 - 1) + 1)


def in_place(name: str, x: T, *args: Any, **kwargs: Any) -> Draw | None:
    """What an operation that fills `x` draws; None for other operations."""
    make = _IN_PLACE.get(name)
    return None if make is None else make(x, *args, **kwargs)


_IN_PLACE: dict[str, Callable[..., Draw]] = {
    "uniform_": lambda x, low=0.0, high=1.0, **_: uniform_of(x.dtype, low, high),
    "normal_": lambda x, mean=0.0, std=1.0, **_: normal_of(mean, std),
    "bernoulli_.float": lambda x, p=0.5, **_: below(p),
    "exponential_": lambda x, lambd=1.0, **_: exponential_of(lambd),
    "geometric_": lambda x, p, **_: geometric_of(p),
    "cauchy_": lambda x, median=0.0, sigma=1.0, **_: cauchy_of(median, sigma),
    "log_normal_": lambda x, mean=1.0, std=2.0, **_: log_normal_of(mean, std),
    "random_": lambda x, **_: integers_of(x.dtype),
    "random_.to": lambda x, to, **_: integers(0, to),
    "random_.from": lambda x, low, to, **_: integers_of(x.dtype) if to is None else integers(low, to),
}
"""Operations whose numbers depend on an element's place alone."""

IN_PLACE = tuple(_IN_PLACE)
