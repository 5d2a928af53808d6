"""A norm under `SequenceParallel` whose sharded dim is one that it normalizes: [tokens, features] by `Shard(1)`.

PyTorch's norm then gathers the features and returns a replicated DTensor. So does this one. Every rank computes with all features,
and what its parameters get on each rank is divided by the number of ranks, because the gradients of a norm on sequence shards are
summed over them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from parallelize.axes.tensor.placements import as_dtensor, local_input
from parallelize.axes.tensor.planned_forward import ModuleRuntime
from parallelize.comm.groups import Group


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
    """How many of the last dims a norm computes its statistics over; 0 for a module that is no norm, such as a dropout."""
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, tuple):
        return len(shape)
    return max((parameter.ndim for parameter in module.parameters(recurse=False)), default=0)


def _is_normalized(x: torch.Tensor, dim: int, normalized: int) -> bool:
    return dim % x.ndim >= x.ndim - normalized


def _enter(x: torch.Tensor, *, usual: Callable | None, gather: Callable, dim: int, normalized: int) -> torch.Tensor:
    if _is_normalized(x, dim, normalized):
        return gather(x)
    return x if usual is None else usual(x)


def _leave(
    y: torch.Tensor, *, usual: Callable | None, mesh: DeviceMesh | None, ranks: int, dim: int, normalized: int
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
    def backward(ctx: Any, grad: torch.Tensor):
        return grad / ctx.ranks, None
