"""RMSNorm over a width that is sharded over `tp`, such as a norm across all heads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops

MAGNITUDES = (1.0, 1e-2, 1e-4)
"""Of the numbers that a norm is compared on: a wrong eps shows on small ones."""


def check_rms_norm(module: Any, fqn: str) -> None:
    """Raises: ModelError `not-rms-norm` where the module computes something else (compared on random numbers, large and small)."""
    stock, generator = with_random_weights(module)
    with torch.no_grad():
        for magnitude in MAGNITUDES:
            x = torch.randn(3, stock.weight.shape[0], generator=generator) * magnitude
            actual = _rms_norm(x, stock.weight, _eps(module, x.dtype), x.shape[-1], None)
            if not is_close(actual, stock(x)):
                what = f"{type(module).__name__} is not x * rsqrt(mean(x^2) + eps) * weight, with an attribute `eps`"
                raise ModelError(
                    Problem("not-rms-norm", what, fix="`replicate`; or `self.eps`, where the number stands in its code")
                )


def with_random_weights(module: Any) -> tuple[Any, torch.Generator]:
    """A copy of a norm in float32 on the CPU, and the generator that its weights were drawn from."""
    stock = copy.deepcopy(module).to_empty(device="cpu").float().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in stock.parameters():
        parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return stock, generator


def is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether they are equal but for rounding in float32."""
    return expected.shape == actual.shape and bool((expected - actual).abs().max() <= 1e-5 * expected.abs().max())


def sharded_rms_norm(group: Group) -> Callable:
    """A forward for RMSNorm on a shard of the width. One value a token is all-reduced, in forward and in backward."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = self._applied.planned.weight.local(self._parameters)
        return _rms_norm(x, weight, _eps(self, x.dtype), x.shape[-1] * group.size, group)

    return forward


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, width: int, group: Group | None) -> torch.Tensor:
    """RMSNorm of x [.., local width]; `width` is the full one. The mean square is computed in float32 at least."""
    work = x if x.dtype == torch.float64 else x.float()
    square = work.pow(2).sum(-1, keepdim=True)
    if group is not None:
        square = ops.sum_both(square, group)
    return (weight * (work * torch.rsqrt(square / width + eps))).to(x.dtype)


def _eps(module: Any, dtype: torch.dtype) -> float:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return torch.finfo(dtype).eps if eps is None else eps
