"""Boundary conversions of PyTorch's styles, whose modules may be called with DTensors, and may have to return one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from parallelize.axes.tensor.dtensor_handover import (
    FULL,
    SHARD,
    Questions,
    WatchedDTensor,
    gathered_as_dtensor,
    needs_placement,
    read_by_plan,
)
from parallelize.axes.tensor.placements import BiasedOutput, convert, convert_output, even_shard, local_input
from parallelize.axes.tensor.planned_forward import ModuleRuntime
from parallelize.axes.tensor.shared_input import SharedConversion
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.plan.styles.contract import Contract, Conversion

SharedConversions = dict[tuple[str, int], SharedConversion]


def input_conversion(
    contract: Contract, tp: DeviceMesh, group: Group, conversions: SharedConversions
) -> Callable | None:
    """What makes the input that a module computes with, most often a plain local tensor; None where it is one already.

    conversions: of the column linears of the model, which share them, by conversion and dim.
    """
    traits, dim = contract.traits, contract.sequence_dim
    if contract.enter is Conversion.LEAVE_REGION:
        return GatheredForCode(tp, group, dim, not contract.computes_with_dtensors)
    if contract.enter in (Conversion.COPY, Conversion.GATHER_SEQUENCE):
        gathers = contract.enter is Conversion.GATHER_SEQUENCE
        key = contract.enter.value, dim if gathers else 0
        source: Placement = Shard(dim) if gathers else Replicate()
        if key not in conversions:
            conversions[key] = SharedConversion(partial(_full_input, mesh=tp, group=group, source=source))
        return conversions[key]
    if contract.takes_ids:
        return _full_ids
    if traits.splits_output:  # its block has gathered the input
        return None
    desired = Shard(dim) if traits.by_token else Shard(-1)
    source = Replicate() if contract.enter is Conversion.SPLIT_LAST else desired
    adapt = partial(local_input, mesh=tp, group=group, source=source, desired=desired, partial_grad=False)
    return adapt if contract.enter is Conversion.SPLIT_LAST else partial(_local, adapt=adapt)


def _full_input(x: torch.Tensor, mesh: DeviceMesh, group: Group, source: Placement) -> torch.Tensor:
    """The full plain input of a column linear."""
    needs_placement(x, source)
    full = partial_of_gathered(x) if source.is_replicate() else None
    if full is not None:
        return full
    return local_input(x, mesh=mesh, group=group, source=source, desired=Replicate(), partial_grad=True)


def return_dtensor(
    module: nn.Module, planned: ModuleRuntime, contract: Contract, tp: DeviceMesh, group: Group, width: int | None
) -> None:
    """Make the output a DTensor. width: the full size of the last dim where the output is a shard of it."""
    source, desired = _output_placements(contract)
    if contract.adds_bias_after_sum and planned.bias is not None and planned.leave is not None:
        planned.leave = biased = BiasedOutput(planned.leave, tp, desired)
        module.register_forward_hook(biased.wrap)
        return
    returned = partial(convert_output, mesh=tp, group=group, source=source, desired=desired, width=width)
    planned.leave = ShardForCode(returned) if contract.traits.by_token else returned


class ShardForCode:
    """The output of a norm on sequence shards: a DTensor, until a forward has shown that its shard will do.

    Args:
        as_dtensor: makes the DTensor of a shard.
    """

    __slots__ = ("_as_dtensor", "_questions")

    def __init__(self, as_dtensor: Callable[[torch.Tensor], Any]):
        self._as_dtensor, self._questions = as_dtensor, Questions(SHARD)

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        if self._questions.need_no_dtensor():
            return y
        return self._questions.watched(self._as_dtensor(y))

    def __deepcopy__(self, memo: dict) -> ShardForCode:
        return memo.setdefault(id(self), ShardForCode(self._as_dtensor))


def _output_placements(contract: Contract) -> tuple[Placement, Placement]:
    """(before, after) the conversion of the output."""
    dim = contract.sequence_dim
    source: Placement = Shard(-1)
    if contract.traits.sums_output:
        source = Partial()
    elif contract.traits.by_token:
        source = Shard(dim)
    desired = {
        Conversion.GATHER_LAST: Replicate(),
        Conversion.REDUCE: Replicate(),
        Conversion.SCATTER_SEQUENCE: Shard(dim),
    }
    return source, desired.get(contract.leave, source)


def _local(x: torch.Tensor, adapt: Callable) -> torch.Tensor:
    return adapt(x) if isinstance(x, DTensor) else x


def _full_ids(ids: torch.Tensor) -> torch.Tensor:
    return ids.full_tensor() if isinstance(ids, DTensor) else ids


# -- gathered for code -----------------------------------------------------------------------------------------------
# The gathered input of a block whose own code reads it: a DTensor, until a forward has shown that a plain tensor will
# do. PyTorch's `PrepareModuleInput` passes a DTensor by default, because the code of the block may compute with it.
# Most code only asks for its shape and passes it to linears, which the first forward shows (`dtensor_handover.py`). A
# plain tensor has two gradients: that of column linears is one term of a sum on each rank, that of any other code is
# the same on all ranks. So it is gathered with the second, and a linear that reads the very tensor takes the first,
# from the shard behind it.


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


# -- a plain full tensor, and the shard behind it ----------------------------------------------------------------------


def _gathered(shard: T, group: Group, dim: int) -> T:
    """The full tensor, whose gradient is the same on each rank. It knows its shard."""
    full = ops.gather(shard, group, dim, shard.shape[dim] * group.size, "replicate")
    setattr(full, _SHARD, (shard, group, dim, full._version))
    return full


def partial_of_gathered(full: T) -> T | None:
    """The same values, where `full` is what a block has gathered, for a reader whose gradient is one term of a sum: it
    is scattered to the shards at once. None for any other tensor, one that was written to since included."""
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
