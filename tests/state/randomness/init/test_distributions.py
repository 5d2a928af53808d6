"""Distributions of initializers have their moments, limits and errors."""

from __future__ import annotations

import math

import pytest
import torch

from parallelize import ModelError
from parallelize.ops.random.counter import key
from parallelize.state.randomness.init.distributions import (
    Constant,
    Normal,
    TruncatedNormal,
    Uniform,
    kaiming_uniform,
    xavier_normal,
    xavier_uniform,
)

COUNT = 1 << 18
KEYS = [key(0, "a", 0), key(0, "a", 1), key(0, "b", 0), key(1, "a", 0)]


def indices(count: int = COUNT, start: int = 0, step: int = 1) -> torch.Tensor:
    return torch.arange(start, start + count * step, step)


def moments(drawn: torch.Tensor) -> list[float]:
    z = (drawn - drawn.mean()) / drawn.std()
    return [float(drawn.mean()), float(drawn.std()), float((z**3).mean()), float((z**4).mean())]


@pytest.mark.parametrize(
    ("distribution", "mean", "std", "kurtosis"),
    [
        (Normal(0.5, 2.0), 0.5, 2.0, 3.0),
        (Uniform(-1.0, 3.0), 1.0, 4 / math.sqrt(12), 1.8),
        (TruncatedNormal(0.0, 1.0, -2.0, 2.0), 0.0, 0.879626, 2.37),
        (TruncatedNormal(0.0, 1.0, 1.0, 40.0), 1.525135, 0.446, None),
        (Constant(2.5), 2.5, 0.0, None),
        (kaiming_uniform(48), 0.0, 1 / 12, 1.8),
        (xavier_uniform(30, 18), 0.0, math.sqrt(2 / 48), 1.8),
        (xavier_normal(30, 18), 0.0, math.sqrt(2 / 48), 3.0),
    ],
    ids=str,
)
def test_distributions_have_their_moments(distribution, mean, std, kurtosis):
    drawn = distribution.draw(KEYS[0], indices())
    actual = moments(drawn) if std else [float(drawn.mean()), float(drawn.std()), 0.0, 0.0]
    assert abs(actual[0] - mean) < 5 * max(std, 1e-9) / math.sqrt(COUNT) and abs(actual[1] - std) < 0.005 * max(
        std, 1e-9
    )
    assert kurtosis is None or (abs(actual[2]) < 0.03 and abs(actual[3] - kurtosis) < 0.06)


def test_truncation_holds_and_scaling_is_that_of_the_numbers():
    drawn = TruncatedNormal(0.1, 0.5, -0.3, 0.2).draw(KEYS[0], indices())
    assert float(drawn.min()) >= -0.3 and float(drawn.max()) <= 0.2 and drawn.unique().numel() > COUNT * 0.99
    for distribution in (Constant(3.0), Uniform(-1.0, 2.0), Normal(1.0, 2.0), TruncatedNormal(0.0, 1.0, -1.0, 2.0)):
        scaled = distribution.affine(2.0, 1.0).draw(KEYS[0], indices(1000))
        assert torch.allclose(scaled, distribution.draw(KEYS[0], indices(1000)) * 2.0 + 1.0, rtol=1e-12)


@pytest.mark.parametrize(
    "wrong", [lambda: Normal(0.0, -1.0), lambda: Uniform(2.0, 1.0), lambda: TruncatedNormal(0.0, 1.0, 60.0, 61.0)]
)
def test_what_is_no_distribution_is_refused(wrong):
    with pytest.raises(ModelError) as error:
        wrong()
    assert error.value.slugs == ("bad-distribution",)
