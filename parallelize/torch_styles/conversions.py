"""Activations between placements, as plain local tensors where possible: what PyTorch's styles do at their borders."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from parallelize.groups import Group
from parallelize.ops import collectives as ops


def enter(
    x: torch.Tensor, mesh: DeviceMesh, group: Group, source: Placement, want: Placement, partial_grad: bool
) -> torch.Tensor:
    """The plain local input that the style computes with."""
    want = positive(want, x.ndim)
    if isinstance(x, DTensor):
        if x.placements != (want,):
            x = x.redistribute(placements=(want,))
        return x.to_local(grad_placements=(Partial(),) if partial_grad else None)
    return redistribute(x, mesh, group, positive(source, x.ndim), want, partial_grad)


def leave(
    y: torch.Tensor, mesh: DeviceMesh, group: Group, have: Placement, want: Placement, width: int | None, local: bool
) -> torch.Tensor:
    have, want = positive(have, y.ndim), positive(want, y.ndim)
    if have != want:
        if have.is_shard() and want.is_replicate() and width is not None:
            y = ops.gather(y, group, -1, width, "replicate")
        else:
            y = redistribute(y, mesh, group, have, want, partial_grad=False)
        width = None
    return y if local else as_dtensor(y, mesh, want, width)


def redistribute(
    x: torch.Tensor, mesh: DeviceMesh, group: Group, have: Placement, want: Placement, partial_grad: bool
) -> torch.Tensor:
    """A plain local tensor from one layout to another, by the cheapest pair of collectives."""
    if have.is_replicate() and want.is_replicate():
        return ops.copy(x, group) if partial_grad else x
    if have == want:
        return x
    if have.is_shard() and want.is_replicate():
        gradient = "partial" if partial_grad else "replicate"
        return ops.gather(x, group, have.dim, x.shape[have.dim] * group.size, gradient)
    if have.is_replicate() and want.is_shard() and want.dim == x.ndim - 1:
        return ops.split(x, group, -1)
    even = want.is_shard() and x.shape[want.dim] % group.size == 0
    if have.is_replicate() and even:
        return ops.split(x, group, want.dim)
    if have.is_partial() and want.is_replicate():
        return ops.sum_both(x, group) if partial_grad else ops.reduce(x, group)
    if have.is_partial() and even:
        return ops.reduce_scatter(x, group, want.dim)
    return DTensor.from_local(x, mesh, (have,), run_check=False).redistribute(placements=(want,)).to_local()


def convert(x: Any, mesh: DeviceMesh, group: Group, have: Placement | None, want: Placement | None, local: bool) -> Any:
    """One input or output between layouts, as a DTensor or a plain tensor."""
    if have is None or want is None or not isinstance(x, torch.Tensor):
        return x
    have, want = positive(have, x.ndim), positive(want, x.ndim)
    if isinstance(x, DTensor) or not local:
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (have,), run_check=False)
        x = x if x.placements == (want,) else x.redistribute(placements=(want,))
        return x.to_local() if local else x
    return redistribute(x, mesh, group, have, want, partial_grad=False)


def as_dtensor(y: torch.Tensor, mesh: DeviceMesh, placement: Placement, width: int | None = None) -> DTensor:
    placement = positive(placement, y.ndim)
    if width is None:
        return DTensor.from_local(y, mesh, (placement,), run_check=False)
    shape = (*y.shape[:-1], width)
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return DTensor.from_local(
        y, mesh, (placement,), run_check=False, shape=torch.Size(shape), stride=tuple(reversed(strides))
    )


def positive(placement: Placement, ndim: int) -> Placement:
    return Shard(placement.dim + ndim) if placement.is_shard() and placement.dim < 0 else placement
