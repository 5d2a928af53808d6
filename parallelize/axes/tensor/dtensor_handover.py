"""DTensors between two styles: made and gathered by one autograd Function each, with PyTorch's gradients.

A norm under `SequenceParallel` returns a DTensor, and so does `PrepareModuleInput`, because the stock forward may compute with
it. PyTorch's `from_local` and `redistribute` check and dispatch at every call. These Functions take the spec from a table and run
this package's collectives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.ops import replay_cache
from parallelize.ops.collectives import gather_dim, reduce_scatter_dim, refuse_double_backward, split_dim

T = torch.Tensor
_SPECS = "_parallelize_specs"
_MOST_SPECS = 256


def shard_as_dtensor(y: T, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A DTensor around an even shard."""
    return _AsDTensor.apply(y, _spec_of(mesh, placement, y))


def gathered_as_dtensor(shard: T, mesh: DeviceMesh, group: Group, dim: int) -> DTensor:
    """The replicated DTensor of an even shard, by one all-gather. Its gradient may be partial or replicated."""
    return _GatheredDTensor.apply(shard, mesh, group, dim)


def _spec_of(mesh: DeviceMesh, placement: Placement, local: T) -> Any:
    """The spec that PyTorch gives to a DTensor with such shards; the mesh remembers them."""
    specs: dict[tuple, Any] = mesh.__dict__.setdefault(_SPECS, {})
    key = placement, local.shape, local.stride(), local.dtype
    if key not in specs:
        if len(specs) >= _MOST_SPECS:
            specs.clear()
        like = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
        specs[key] = private.spec_of(DTensor.from_local(like, mesh, (placement,), run_check=False))
    return specs[key]


class _AsDTensor(Function):
    @staticmethod
    def forward(ctx: Any, local: T, spec: Any) -> DTensor:
        ctx.spec = spec
        return private.wrap(local.view_as(local), spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: Any):
        refuse_double_backward()
        if grad.placements != ctx.spec.placements:
            grad = grad.redistribute(placements=ctx.spec.placements)
        return grad.to_local(), None


class _GatheredDTensor(Function):
    @staticmethod
    def forward(ctx: Any, shard: T, mesh: DeviceMesh, group: Group, dim: int) -> DTensor:
        ctx.args = group, dim
        size = shard.shape[dim] * group.size
        full = replay_cache.run_collective("all_gather", gather_dim, shard, group, dim, size)
        return private.wrap(full, _spec_of(mesh, Replicate(), full), requires_grad=shard.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: Any):
        refuse_double_backward()
        group, dim = ctx.args
        placement = grad.placements[0]
        if placement.is_partial():
            local = reduce_scatter_dim(grad.to_local(), group, dim)
        elif placement.is_replicate():
            local = split_dim(grad.to_local(), group, dim)
        else:
            local = grad.redistribute(placements=(Shard(dim),)).to_local()
        return local, None, None, None
