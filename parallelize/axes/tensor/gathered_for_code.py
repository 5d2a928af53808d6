"""The gathered input of a block whose own code reads it: a DTensor, until a forward has shown that a plain tensor will do.

PyTorch's `PrepareModuleInput` passes a DTensor by default, because the code of the block may compute with it. Most code only asks
for its shape and passes it to linears, which the first forward shows (`watched_dtensor.py`).

A plain tensor has two gradients: that of column linears is one term of a sum on each rank, that of any other code is the same on all
ranks. So it is gathered with the second, and a linear that reads the very tensor takes the first, from the shard behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from parallelize.axes.tensor.dtensor_handover import gathered_as_dtensor
from parallelize.axes.tensor.placements import convert, even_shard
from parallelize.axes.tensor.watched_dtensor import FULL, Questions, WatchedDTensor, needs_placement, read_by_plan
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops

T = torch.Tensor
_SHARD = "_gathered_shard"


class GatheredForCode:
    """The input conversion of one block.

    Args:
        mesh, group: of tp. dim: the input is sharded along it.
        is_local: the style asks for a plain tensor.
    """

    __slots__ = ("_questions", "dim", "group", "is_local", "mesh")

    def __init__(self, mesh: DeviceMesh, group: Group, dim: int, is_local: bool):
        self.mesh, self.group, self.dim, self.is_local = mesh, group, dim, is_local
        self._questions = Questions(FULL)

    def __call__(self, x: Any) -> Any:
        if type(x) is WatchedDTensor:
            with read_by_plan(x):
                return self(x)
        needs_placement(x, Shard(self.dim))
        shard = self._shard_of(x)
        if shard is None:  # uneven, or a DTensor of another placement
            source = Shard(self.dim)
            return convert(x, mesh=self.mesh, group=self.group, source=source, desired=Replicate(), local=self.is_local)
        if self.is_local or self._questions.need_no_dtensor():
            return _gathered(shard, self.group, self.dim % shard.ndim)
        return self._questions.watched(gathered_as_dtensor(shard, self.mesh, self.group, self.dim % shard.ndim))

    def _shard_of(self, x: Any) -> T | None:
        if not isinstance(x, T) or torch.compiler.is_compiling():
            return None
        return even_shard(x, Shard(self.dim % x.ndim))

    def __deepcopy__(self, memo: dict) -> GatheredForCode:
        return memo.setdefault(id(self), GatheredForCode(self.mesh, self.group, self.dim, self.is_local))


# -- a plain full tensor, and the shard behind it -------------------------------------------------------------------------


def _gathered(shard: T, group: Group, dim: int) -> T:
    """The full tensor, whose gradient is the same on each rank. It knows its shard."""
    full = ops.gather(shard, group, dim, shard.shape[dim] * group.size, "replicate")
    setattr(full, _SHARD, (shard, group, dim, full._version))
    return full


def partial_of_gathered(full: T) -> T | None:
    """The same values, where `full` is what a block has gathered, for a reader whose gradient is one term of a sum: it is scattered
    to the shards at once. None for any other tensor, one that was written to since included."""
    shard, group, dim, version = getattr(full, _SHARD, (None, None, 0, 0))
    if shard is None or group is None or full._version != version:
        return None
    return _PartialOfGathered.apply(shard, (full,), group, dim)


class _PartialOfGathered(Function):
    """full: in a tuple, which hides it from autograd: its own gradient is another one."""

    @staticmethod
    def forward(ctx: Any, shard: T, full: tuple[T], group: Group, dim: int) -> T:
        ctx.args = group, dim
        return full[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: T):
        ops.refuse_double_backward()
        return ops.reduce_scatter_dim(grad, *ctx.args), None, None, None
