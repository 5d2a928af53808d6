"""RMSNorm of a gated output, by groups of features, on a shard of the features: the norm of Mamba 2.

Where a group is on one rank, nothing is sent. Where it spans several, one value a token and group is summed over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from parallelize.axes.tensor.layers.rms_norm import MAGNITUDES, is_close, with_random_weights
from parallelize.base.errors import ModelError, Problem
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.plan.resolved import ParameterRow


def check_gated_norm(module: Any, fqn: str) -> None:
    """Raises: ModelError `not-gated-norm` where the module computes something else (compared on random numbers)."""
    stock, generator = with_random_weights(module)
    with torch.no_grad():
        for magnitude in MAGNITUDES:
            x, gate = torch.randn(2, 3, stock.weight.shape[0], generator=generator)
            x = x * magnitude
            actual = _gated_norm(x, gate, stock.weight, _eps(module), _group_size(module), None, 1)
            if not is_close(actual, stock(x, gate)):
                what = f"{fqn}: {type(module).__name__} is not the norm of x * silu(gate) by groups, times a weight"
                raise ModelError(Problem("not-gated-norm", what, fix="`replicate` for the mixer, with `full_sequence`"))


def sharded_gated_norm(
    module: Any, weight: ParameterRow, group: Group, subgroup: Callable[[tuple[int, ...]], Group]
) -> Callable:
    """A forward on this rank's features. subgroup: of these ranks of `group`, which have the features of one group together."""
    width = weight.layout.local_size(group.rank)
    ranks = max(_group_size(module) // width, 1)
    first = group.rank // ranks * ranks
    sharers = subgroup(tuple(range(first, first + ranks))) if ranks > 1 else None

    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        weight = self._applied.planned.weight.local(self._parameters)
        return _gated_norm(hidden_states, gate, weight, _eps(self), _group_size(self), sharers, ranks)

    return forward


def _gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    size: int,
    group: Group | None,
    ranks: int,
) -> torch.Tensor:
    """size: features of a group, which `ranks` ranks have together. Computed in float32 at least."""
    work = x if x.dtype == torch.float64 else x.float()
    if gate is not None:
        work = work * F.silu(gate.to(work.dtype))
    by_group = work.unflatten(-1, (-1, size // ranks))
    square = by_group.pow(2).sum(-1, keepdim=True)
    if group is not None:
        square = ops.sum_both(square, group)
    return weight * (by_group * torch.rsqrt(square / size + eps)).flatten(-2).to(x.dtype)


def _group_size(module: Any) -> int:
    return getattr(module, "group_size", None) or module.weight.shape[0]


def _eps(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6)))
