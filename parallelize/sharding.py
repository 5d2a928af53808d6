"""Full parameters to DTensors and back: cutting, storing and un-permuting, as the layout says.

A layout that a plain `Shard` cannot express (packed projections, key/value heads held by several ranks) is stored as an
even plain `Shard` of permuted rows, padded at the end of a rank's shard where ranks hold different numbers. Whoever looks
from outside gets the original order: `full_parameter`, and the state dict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.gradients import Ledger
from parallelize.groups import Group
from parallelize.layout import Layout, SlicePair, chunked, even_interval, replicated
from parallelize.ops.collectives import gather_dim
from parallelize.parameters import OWN, SHARED, Shared
from parallelize.plan.resolve import ParameterRow, ResolvedPlan


@dataclass(frozen=True)
class Record:
    """What was applied to a model; kept on its root module."""

    resolved: ResolvedPlan
    mesh: DeviceMesh
    tp: DeviceMesh
    group: Group
    ledger: Ledger
    overlap: Any = None  # parallelize.overlap.Overlap
    region: Any = None  # parallelize.region.Region, where sequence parallelism is on
    whole: ResolvedPlan | None = None  # of the whole model, where this rank has a pipeline stage of it

    def __deepcopy__(self, memo: dict) -> Record:
        return self


def record_of(module: nn.Module) -> Record | None:
    """What was applied to this model, or None."""
    return module.__dict__.get("_parallelize_record")


@dataclass(frozen=True)
class ShardInfo:
    """Where one parameter lies: its global ranks, full shape, and the slices that each rank holds.

    `ranks[i]` holds `layout.slices(i)`. Checkpoints write these same pairs.
    """

    fqn: str
    ranks: tuple[int, ...]
    layout: Layout

    @property
    def full_shape(self) -> tuple[int, ...]:
        return self.layout.shape

    def slices(self, rank: int) -> tuple[SlicePair, ...]:
        """(local, full) slice pairs of a global rank."""
        return self.layout.slices(self.ranks.index(rank))

    def multiplicity(self, pair: SlicePair) -> int:
        """How many ranks hold these elements."""
        return sum(any(pair.full == other.full for other in self.slices(rank)) for rank in self.ranks)


def shared_of_parameters(module: nn.Module) -> dict[int, Shared]:
    """id of a parameter -> (dim, start, stop, holders) of its local rows that other tp ranks hold too.

    Read from what the planned modules run with, so wrappers around them, and ZeRO's own parameters, do not matter.
    """
    found = {}
    for owner in module.modules():
        planned = owner.__dict__.get("_planned")
        for slot in planned.slots if planned is not None else ():
            if slot.shared:
                found[id(owner._parameters[slot.key])] = slot.shared
    return found


def shared_of(layout: Layout, rank: int) -> Shared:
    return tuple((layout.dim or 0, start, stop, len(ranks)) for start, stop, ranks in layout.shared(rank))


def shard_info(module: nn.Module) -> dict[str, ShardInfo]:
    """Parameter name to where it lies, for every DTensor parameter of a model that `parallelize_module` returned.

    Raises: ModelError `not-parallelized`.
    """
    return {
        name: ShardInfo(name, group.ranks, layout)
        for layout, group, names in _planned_parameters(module)
        for name in names
    }


def _planned_parameters(module: nn.Module) -> Iterator[tuple[Layout, Group, tuple[str, ...]]]:
    """(layout, group, names) of each parameter: as the plan says, or, after a dict of styles, as its placements do."""
    record = record_of(module)
    if record is not None:
        yield from ((row.layout, record.group, row.fact.names) for row in record.resolved.parameters.values())
        return
    names: dict[int, list[str]] = {}
    held = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in held.items():
        if isinstance(parameter, DTensor):
            names.setdefault(id(parameter), []).append(name)
    if not names:
        raise not_parallelized(module)
    groups: dict[Any, Group] = {}
    for found in names.values():
        one: Any = held[found[0]]
        mesh = one.device_mesh
        group = groups.setdefault(mesh, Group(mesh.get_group("tp" if mesh.ndim > 1 else 0)))
        dim = private.shard_dim(one.placements[-1])
        shape = tuple(one.shape)
        layout = replicated(shape, group.size) if dim is None else chunked(shape, dim, group.size)
        yield layout, group, tuple(found)


def full_parameter(module: nn.Module, fqn: str, value: Any = None) -> torch.Tensor:
    """A parameter in its original order and shape, on every rank of `tp`. A collective: call it on all of them.

    Args:
        value: a DTensor stored like that parameter (its gradient, an optimiser's moment) to unshard instead.

    Raises: ModelError `not-parallelized`, AttributeError for a name that the model does not have.
    """
    stored = module.get_parameter(fqn) if value is None else value
    if not isinstance(stored, DTensor):
        return stored
    layout, group = next((layout, group) for layout, group, names in _planned_parameters(module) if fqn in names)
    return unshard(stored, layout, group)


def full_state_dict(module: nn.Module, *, every_rank: bool = False) -> dict[str, torch.Tensor]:
    """The whole state dict on the CPU, in original order: what the unsharded model's `load_state_dict` takes.

    A collective: call it on every rank. Only rank 0 gets it, the others an empty dict, unless `every_rank`. One tensor at
    a time is whole on the device; tied parameters stay one tensor.
    """
    keep = every_rank or dist.get_rank() == 0
    done: dict[int, torch.Tensor] = {}
    whole = {}
    state = module.state_dict()
    for name, value in state.items():
        if id(value) not in done:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            done[id(value)] = full.detach().cpu() if keep else full.new_empty(0)
        if keep:
            whole[name] = done[id(value)]
    return whole


def full_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameter name to its whole gradient, for every parameter that has one. A collective over tp."""
    found = {}
    record = record_of(module)
    any_split = record is not None or any(isinstance(parameter, DTensor) for parameter in module.parameters())
    rows = _planned_parameters(module) if any_split else ()
    planned = {names[0]: (layout, group) for layout, group, names in rows}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[name] = _whole_gradient(parameter, planned.get(name))
    return found


def _whole_gradient(parameter: Any, planned: tuple[Layout, Group] | None) -> torch.Tensor:
    grad = parameter.grad
    if not isinstance(grad, DTensor):
        return grad.clone()
    # ZeRO has split the gradient of a parameter that no plan has
    return grad.full_tensor() if planned is None or not isinstance(parameter, DTensor) else unshard(grad, *planned)


def require_record(module: nn.Module) -> Record:
    """Raises: ModelError `not-parallelized`."""
    record = record_of(module)
    if record is None:
        raise not_parallelized(module)
    return record


def not_parallelized(module: nn.Module) -> ModelError:
    return ModelError(
        Problem("not-parallelized", f"{type(module).__name__} has no plan", fix="call parallelize_module first")
    )


class Sharder:
    """Replaces parameters by their DTensors, one at a time."""

    def __init__(
        self,
        tp: DeviceMesh,
        group: Group,
        source: int | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ):
        self.tp, self.group, self.source, self.dtype, self.device = tp, group, source, dtype, device

    def shard(self, module: nn.Module, resolved: ResolvedPlan) -> None:
        for row in resolved.parameters.values():
            new = self.parameter(module.get_parameter(row.fqn), row.layout)
            for name in row.fact.names:
                owner, _, key = name.rpartition(".")
                module.get_submodule(owner)._parameters[key] = new

    def parameter(self, full: nn.Parameter, layout: Layout) -> nn.Parameter:
        """The DTensor parameter for a full one, with its flags and attributes."""
        dtype = self.dtype if self.dtype is not None and full.is_floating_point() else full.dtype
        device = full.device if full.is_meta or self.device is None else torch.device(self.device)
        data = full.detach()
        if not full.is_meta and self.source is not None and self.group.size > 1:
            data = data.to(self.tp.device_type).clone(memory_format=torch.contiguous_format)
            self.group.broadcast(data, self.source)
        local = store(data, layout, self.group.rank).to(device=device, dtype=dtype)
        new = nn.Parameter(as_dtensor(local, layout, self.tp), requires_grad=full.requires_grad)
        new.__dict__.update(full.__dict__)
        setattr(new, OWN, True)
        if shared := shared_of(layout, self.group.rank):
            setattr(new, SHARED, shared)
        return new


def as_dtensor(stored: torch.Tensor, layout: Layout, tp: DeviceMesh) -> DTensor:
    """A DTensor around a stored shard."""
    placement = Replicate() if layout.dim is None else Shard(layout.dim)
    return from_local(stored, layout.stored_shape, placement, tp)


def from_local(local: torch.Tensor, shape: tuple[int, ...], placement: Any, tp: DeviceMesh) -> DTensor:
    """A DTensor of a known full shape, which uneven shards do not tell."""
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return DTensor.from_local(
        local, tp, [placement], run_check=False, shape=torch.Size(shape), stride=tuple(reversed(strides))
    )


def store(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """A rank's shard of a full tensor as it is stored: its slices in order, padded where shards must be even."""
    if layout.dim is None:
        return full.clone(memory_format=torch.contiguous_format)
    parts = [full[pair.full] for pair in layout.slices(rank)]
    if not parts:
        parts = [full.narrow(layout.dim, 0, 0)]
    local = torch.cat(parts, layout.dim).clone(memory_format=torch.contiguous_format)
    if layout.is_canonical or local.shape[layout.dim] == layout.stored_local_size:
        return local
    after = [0, 0] * (local.ndim - 1 - layout.dim) + [0, layout.stored_local_size - local.shape[layout.dim]]
    return F.pad(local, after)


def unshard(stored: Any, layout: Layout, group: Group) -> torch.Tensor:
    """The full tensor in its original order, on every rank. A collective over tp (and over the axes of ZeRO)."""
    local = _without_data_axes(stored, group)
    if layout.dim is None:
        return local.clone()
    if group.size == 1:
        shards = [local]
    else:
        rows = max(layout.local_size(r) for r in range(group.size))
        rows = rows if layout.is_canonical else layout.stored_local_size
        after = [0, 0] * (local.ndim - 1 - layout.dim) + [0, rows - local.shape[layout.dim]]
        shards = list(group.all_gather((F.pad(local, after) if after[-1] else local).contiguous()))
    full = local.new_empty(layout.shape)
    for rank, shard in enumerate(shards):
        for pair in layout.slices(rank):
            full[pair.full] = shard[pair.local]
    return full


def _without_data_axes(stored: DTensor, group: Group) -> torch.Tensor:
    """The tp shard of a DTensor that ZeRO may have sharded further over data axes."""
    local = private.local_of(stored).detach()
    mesh, names = stored.device_mesh, stored.device_mesh.mesh_dim_names or ()
    for axis, placement in reversed(list(enumerate(stored.placements))):
        dim = private.shard_dim(placement)
        if mesh.ndim > 1 and names[axis] != "tp" and dim is not None:
            others = [p for place, p in enumerate(stored.placements) if place != axis]
            size = stored.shape[dim]
            if dim in map(private.shard_dim, others):  # tp's own part of that dim, as `torch.chunk` cuts it
                start, stop = even_interval(size, group.size, group.rank)
                size = stop - start
            data = Group(mesh.get_group(axis))
            rows = -(-size // data.size)
            after = [0, 0] * (local.ndim - 1 - dim) + [0, rows - local.shape[dim]]
            local = gather_dim(F.pad(local, after).contiguous(), data, dim, size)
    return local


def reshard_like(full: torch.Tensor, layout: Layout, group: Group, parameter: Any) -> DTensor:
    """A full tensor as a DTensor stored like `parameter`, ZeRO's sharding included. No communication."""
    local = store(full.to(device=parameter.device), layout, group.rank)
    mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
    for axis, placement in enumerate(parameter.placements):
        dim = private.shard_dim(placement)
        if mesh.ndim > 1 and names[axis] != "tp" and dim is not None:
            start, stop = even_interval(local.shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
            local = local.narrow(dim, start, stop - start).contiguous()
    return private.wrap(local, private.with_dtype(private.spec_of(parameter), local))


def rows_by_name(record: Record) -> dict[str, ParameterRow]:
    return {name: row for row in record.resolved.parameters.values() for name in row.fact.names}
