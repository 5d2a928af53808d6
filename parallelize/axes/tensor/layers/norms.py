"""Norms over a width that is sharded over `tp`: RMSNorm, norms of features and channels, and norms with a gate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from parallelize.axes.tensor.placements import as_dtensor, local_input
from parallelize.axes.tensor.planned_forward import ModuleRuntime
from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import Layout
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.resolved import ParameterRow, ResolvedPlan

MAGNITUDES = (1.0, 1e-2, 1e-4)
"""Of the numbers that a norm is compared on: a wrong eps shows on small ones."""


def check_rms_norm(module: Any, fqn: str) -> None:
    """Raises: ModelError `not-rms-norm` where the module computes something else (compared on random numbers, large and
    small)."""
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


def sharded_rms_norm(group: Group) -> Callable[..., Any]:
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


# -- gated norm ------------------------------------------------------------------------------------------------------
# RMSNorm of a gated output, by groups of features, on a shard of the features: the norm of Mamba 2. Where a group is
# on one rank, nothing is sent. Where it spans several, one value a token and group is summed over them.


def check_gated_norm(module: Any, fqn: str) -> None:
    """Raises: ModelError `not-gated-norm` where the module computes something else (compared on random numbers)."""
    stock, generator = with_random_weights(module)
    with torch.no_grad():
        for magnitude in MAGNITUDES:
            x, gate = torch.randn(2, 3, stock.weight.shape[0], generator=generator)
            x = x * magnitude
            actual = _gated_norm(x, gate, stock.weight, _gate_eps(module), _group_size(module), None, 1)
            if not is_close(actual, stock(x, gate)):
                what = f"{fqn}: {type(module).__name__} is not the norm of x * silu(gate) by groups, times a weight"
                raise ModelError(Problem("not-gated-norm", what, fix="`replicate` for the mixer, with `full_sequence`"))


def sharded_gated_norm(
    module: Any, weight: ParameterRow, group: Group, subgroup: Callable[[tuple[int, ...]], Group]
) -> Callable[..., Any]:
    """A forward on this rank's features. subgroup: of these ranks of `group`, which have the features of one group
    together."""
    width = weight.layout.local_size(group.rank)
    ranks = max(_group_size(module) // width, 1)
    first = group.rank // ranks * ranks
    sharers = subgroup(tuple(range(first, first + ranks))) if ranks > 1 else None

    def forward(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        weight = self._applied.planned.weight.local(self._parameters)
        return _gated_norm(hidden_states, gate, weight, _gate_eps(self), _group_size(self), sharers, ranks)

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


def _gate_eps(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6)))


# -- feature norm ----------------------------------------------------------------------------------------------------
# A norm under `SequenceParallel` whose sharded dim is one that it normalizes: [tokens, features] by `Shard(1)`.
# PyTorch's norm then gathers the features and returns a replicated DTensor. So does this one. Every rank computes
# with all features, and what its parameters get on each rank is divided by the number of ranks, because the gradients
# of a norm on sequence shards are summed over them.


def gather_normalized(
    module: nn.Module, planned: ModuleRuntime, dim: int, mesh: DeviceMesh, group: Group, local: bool
) -> None:
    """Let a module on shards of `dim` gather its input wherever `dim` is one of those that it normalizes.

    Args:
        planned: what the module runs, with the conversions of inputs that are sharded along another dim.
        local: whether the output is a plain local tensor rather than a DTensor.
    """
    normalized = _normalized_dims(module)
    if not normalized or group.size == 1:
        return
    gather = partial(local_input, mesh=mesh, group=group, source=Shard(dim), desired=Replicate(), partial_grad=True)
    planned.enter = partial(_enter, usual=planned.enter, gather=gather, dim=dim, normalized=normalized)
    planned.leave = partial(
        _leave, usual=planned.leave, mesh=None if local else mesh, ranks=group.size, dim=dim, normalized=normalized
    )


def _normalized_dims(module: nn.Module) -> int:
    """How many of the last dims a norm computes its statistics over; 0 for a module that is no norm, such as a
    dropout."""
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, tuple):
        return len(shape)
    return max((parameter.ndim for parameter in module.parameters(recurse=False)), default=0)


def _is_normalized(x: torch.Tensor, dim: int, normalized: int) -> bool:
    return dim % x.ndim >= x.ndim - normalized


def _enter(
    x: torch.Tensor, *, usual: Callable[..., Any] | None, gather: Callable[..., Any], dim: int, normalized: int
) -> torch.Tensor:
    if _is_normalized(x, dim, normalized):
        return gather(x)
    return x if usual is None else usual(x)


def _leave(
    y: torch.Tensor, *, usual: Callable[..., Any] | None, mesh: DeviceMesh | None, ranks: int, dim: int, normalized: int
) -> torch.Tensor:
    if not _is_normalized(y, dim, normalized):
        return y if usual is None else usual(y)
    y = _DivideGradient.apply(y, ranks)
    return y if mesh is None else as_dtensor(y, mesh, Replicate())


class _DivideGradient(Function):
    """The identity; backward divides the gradient by a number of ranks that all have it."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return grad / ctx.ranks, None


# -- channel norm ----------------------------------------------------------------------------------------------------
# Batch norm and group norm on this rank's channels, between a column and a row convolution. A batch norm computes
# each channel by itself. Its running statistics are buffers, which are full on each rank: a rank updates those of its
# channels, and the ranks exchange them in each forward in training, so that they are those of the unsharded model.


T = torch.Tensor


def check_channel_norm(module: Any, fqn: str) -> None:
    """Raises: ModelError `not-channel-norm` where the module computes something else than PyTorch's."""
    stock = (torch.nn.GroupNorm, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    if type(module).forward not in {cls.forward for cls in stock}:
        what = f"{fqn} is a {type(module).__name__}, whose forward is its own"
        raise ModelError(Problem("not-channel-norm", what, fix="`replicate` for it and the convolutions beside it"))


def sharded_channel_norm(module: Any, layout: Layout, group: Group) -> Callable[..., Any]:
    """A forward for a norm of channels. layout: of its weight."""
    if isinstance(module, torch.nn.GroupNorm):
        return _group_norm(module.num_groups, module.num_channels)
    owned = layout.owned[group.rank]
    start, stop = owned[0][0], owned[-1][1]
    return _batch_norm(start, stop, group)


def divided_statistics(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[Problem]:
    """Batch norms whose channels the ranks divide into ranges of different sizes, so that statistics cannot be
    exchanged."""
    for fqn, row in resolved.modules.items():
        weight = resolved.parameters.get(f"{fqn}.weight")
        if not row.contract.norms_channels or weight is None or weight.layout.dim is None:
            continue
        layout = weight.layout
        even = layout.shape[0] % layout.num_ranks == 0
        is_range = all(a[1] == b[0] for owned in layout.owned for a, b in pairwise(owned))
        if getattr(model.objects[fqn], "track_running_stats", False) and not (even and is_range):
            what = (
                f"{fqn} has running statistics of {layout.shape[0]} channels, of which the ranks have no ranges of one "
                "size"
            )
            fix = f"a tp size that divides them, or `replicate` for {fqn} and the convolutions beside it"
            yield Problem("divided-statistics", what, row.rule.where, fix=fix)


def _group_norm(num_groups: int, num_channels: int) -> Callable[..., Any]:
    def forward(self: Any, x: T) -> T:
        weight, bias = _parameters(self)
        return F.group_norm(x, x.shape[1] * num_groups // num_channels, weight, bias, self.eps)

    return forward


def _batch_norm(start: int, stop: int, group: Group) -> Callable[..., Any]:
    """[start, stop): this rank's channels."""

    def forward(self: Any, x: T) -> T:
        self._check_input_dim(x)
        weight, bias = _parameters(self)
        mean, var = self.running_mean, self.running_var
        from_batch = self.training or mean is None
        if mean is None:
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, self.eps)
        updates = self.training and self.track_running_stats
        # backward saves them, and the buffers are written below
        mean, var = mean[start:stop].clone(), var[start:stop].clone()
        out = F.batch_norm(x, mean, var, weight, bias, from_batch, _momentum(self, updates), self.eps)
        if updates:
            _exchange(self, mean, var, group)
        return out

    return forward


def _momentum(module: Any, updates: bool) -> float:
    """Counts a batch, as PyTorch does. Without a momentum the statistics are the mean over all batches."""
    if updates and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    if module.momentum is not None:
        return float(module.momentum)
    return 1.0 / float(module.num_batches_tracked) if updates else 0.0


@torch.no_grad()
def _exchange(module: Any, mean: T, var: T, group: Group) -> None:
    """Each rank's statistics to all ranks, in one collective."""
    both = ops.gather(torch.stack((mean, var)), group=group, dim=-1, full=module.num_features, gradient="replicate")
    module.running_mean.copy_(both[0])
    module.running_var.copy_(both[1])


def _parameters(module: Any) -> tuple[T | None, T | None]:
    planned, parameters = module._applied.planned, module._parameters
    slots = {slot.key: slot.local(parameters) for slot in planned.slots}
    return slots.get("weight"), slots.get("bias")
