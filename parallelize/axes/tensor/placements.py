"""Conversions of activations between placements for PyTorch's styles, on plain local tensors where possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from parallelize.axes.tensor.dtensor_handover import gathered_as_dtensor, shard_as_dtensor
from parallelize.base.errors import Problem
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.models.float8_linears import is_float8_linear
from parallelize.plan.resolved import ResolvedPlan
from parallelize.state.sharding import from_local


def local_input(
    x: torch.Tensor, *, mesh: DeviceMesh, group: Group, source: Placement, desired: Placement, partial_grad: bool
) -> torch.Tensor:
    """The plain local input that a style computes with.

    Args:
        source: the placement of a plain `x`; a DTensor has its own.
        partial_grad: the gradient of each rank is one term of a sum.
    """
    desired = positive(desired, x.ndim)
    if isinstance(x, DTensor):
        shard = even_shard(x, x.placements[0])
        if shard is not None and desired.is_replicate():
            return redistribute(shard, mesh, group, x.placements[0], desired, partial_grad)
        if x.placements != (desired,):
            x = x.redistribute(placements=(desired,))
        return x.to_local(grad_placements=(Partial(),) if partial_grad else None)
    return redistribute(x, mesh, group, positive(source, x.ndim), desired, partial_grad)


def convert_output(
    y: torch.Tensor, *, mesh: DeviceMesh, group: Group, source: Placement, desired: Placement, width: int | None
) -> torch.Tensor:
    """The output of a style, as a DTensor.

    Args:
        width: the full size of the last dim where shards of it may be uneven; None: shards are even.
    """
    source, desired = positive(source, y.ndim), positive(desired, y.ndim)
    full = width
    if source != desired:
        full = full_size(y, desired)
        if source.is_shard() and width is not None:
            y = ops.gather(y, group, -1, width, "replicate")
        else:
            y = redistribute(y, mesh, group, source, desired, partial_grad=False)
    return as_dtensor(y, mesh, desired, full)


def full_size(y: torch.Tensor, desired: Placement) -> int | None:
    """The size of the dim that an output will be a shard of, before it is one; None where it will be no shard."""
    return y.shape[dim_of(positive(desired, y.ndim))] if desired.is_shard() else None


class BiasedOutput:
    """The output of a row linear, whose bias is added to a plain tensor after the conversion: then a DTensor again.

    Args:
        convert: the conversion, to a plain tensor.
        placement: of the output.
    """

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor], mesh: DeviceMesh, placement: Placement):
        self.convert, self.mesh, self.placement = convert, mesh, placement
        self._full: int | None = None

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        self._full = full_size(y, self.placement)
        return self.convert(y)

    def wrap(self, module: Any, args: tuple, out: torch.Tensor) -> DTensor:
        """A forward hook of the linear."""
        return as_dtensor(out, self.mesh, self.placement, self._full)

    def __deepcopy__(self, memo: dict) -> BiasedOutput:
        return memo.setdefault(id(self), BiasedOutput(self.convert, self.mesh, self.placement))


def redistribute(
    x: torch.Tensor, mesh: DeviceMesh, group: Group, source: Placement, desired: Placement, partial_grad: bool
) -> torch.Tensor:
    """A plain local tensor from one placement to another, by the cheapest collectives in forward and backward."""
    if source.is_replicate() and desired.is_replicate():
        return ops.copy_to_read(x, group) if partial_grad else x
    if source == desired:
        return x
    if source.is_shard() and desired.is_replicate():
        gradient = "partial" if partial_grad else "replicate"
        return ops.gather(x, group, dim_of(source), x.shape[dim_of(source)] * group.size, gradient)
    if source.is_replicate() and desired.is_shard() and dim_of(desired) == x.ndim - 1:
        return ops.split(x, group, -1)
    if source.is_partial() and desired.is_replicate():
        return ops.reduce(x, group)
    if source.is_partial() and x.shape[dim_of(desired)] % group.size == 0:
        return ops.reduce_scatter(x, group, dim_of(desired))
    return DTensor.from_local(x, mesh, (source,), run_check=False).redistribute(placements=(desired,)).to_local()


def convert(x: Any, *, mesh: DeviceMesh, group: Group, source: Placement, desired: Placement, local: bool) -> Any:
    """The input of a module in another layout, as a plain local tensor if `local`, else as a DTensor."""
    if not isinstance(x, torch.Tensor):
        return x
    source, desired = positive(source, x.ndim), positive(desired, x.ndim)
    if not local and not torch.compiler.is_compiling():
        shard = even_shard(x, source)
        if shard is not None and desired.is_replicate():
            return gathered_as_dtensor(shard, mesh, group, dim_of(source))
    if isinstance(x, DTensor) or not local:
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (source,), run_check=False)
        x = x if x.placements == (desired,) else x.redistribute(placements=(desired,))
        return x.to_local() if local else x
    return redistribute(x, mesh, group, source, desired, partial_grad=False)


def even_shard(x: torch.Tensor, source: Placement) -> torch.Tensor | None:
    """The plain even shard that an input is, or that its DTensor stores, of the placement `source`; None for any
    other."""
    if not source.is_shard():
        return None
    if not isinstance(x, DTensor):
        return x
    if x.placements != (source,) or x.shape[dim_of(source)] % x.device_mesh.size():
        return None
    return x.to_local()


def as_dtensor(y: torch.Tensor, mesh: DeviceMesh, placement: Placement, full: int | None = None) -> DTensor:
    """A DTensor around a local tensor. full: the size of the dim that is sharded; None where shards are even."""
    placement = positive(placement, y.ndim)
    if placement.is_shard() and full is not None:
        dim = dim_of(placement)
        return from_local(y, (*y.shape[:dim], full, *y.shape[dim + 1 :]), placement, mesh)
    if placement.is_shard() and not torch.compiler.is_compiling():
        return shard_as_dtensor(y, mesh, placement)
    return DTensor.from_local(y, mesh, (placement,), run_check=False)


def dim_of(placement: Placement) -> int:
    """The dim that a placement splits: `Shard` and what `fully_shard` makes of it have one, `Placement` declares
    none."""
    return placement.dim  # type: ignore[attr-defined]


def positive(placement: Placement, ndim: int) -> Placement:
    """The placement with a negative dim counted from the front."""
    return Shard(dim_of(placement) + ndim) if placement.is_shard() and dim_of(placement) < 0 else placement


# -- float8 widths ---------------------------------------------------------------------------------------------------
# Linears that compute in float8, on shards: which widths the matmul of float8 takes.


_MULTIPLE = 16  # of inputs and outputs, in `torch._scaled_mm`


def wrong_float8_widths(resolved: ResolvedPlan, model: ModelFacts) -> Iterator[Problem]:
    """A problem for each linear that has widths which its matmul takes, and on a rank has not."""
    for fqn, row in resolved.modules.items():
        module = model.objects[fqn]
        weight = resolved.parameters.get(f"{fqn}.weight")
        if weight is None or weight.layout.dim is None or not is_float8_linear(module):
            continue
        config = getattr(module, "config", None)
        if getattr(config, "emulate", False) or getattr(config, "pad_inner_dim", False):
            continue
        full = weight.layout.shape[weight.layout.dim]
        widths = {weight.layout.local_size(rank) for rank in range(weight.layout.num_ranks)}
        wrong = sorted(width for width in widths if width % _MULTIPLE)
        if full % _MULTIPLE == 0 and wrong:
            what = (
                f"{fqn} computes in float8, whose matmuls take multiples of {_MULTIPLE}, and a rank has {wrong[0]} of "
                f"{full} features"
            )
            fix = (
                "fewer ranks of tp, or leave it out where torchao converts the model: module_filter_fn=lambda _, "
                f"name: name != {fqn!r}"
            )
            yield Problem("float8-width", what, row.rule.where, fix=fix)
