"""Full parameters to DTensors and back, as the layout says.

A layout that `Shard(dim)` cannot express (packed projections, key/value heads that several ranks store) is stored as an even
`Shard` of permuted elements. Shards are padded at the end where ranks store different numbers of them. `full_parameter` and
the state dict return the original order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelize.applied.layout_tensor.layout_dtensor import with_layout, wrap_like
from parallelize.applied.layout_tensor.stored_order import layout_group, store, store_like, unshard
from parallelize.applied.records import PlanRecord, Shared, applied, mark_parameter, not_parallelized, record_of
from parallelize.applied.step_results import ParameterSlot
from parallelize.comm.groups import Group
from parallelize.layout import Layout, SlicePair, chunked, replicated
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.rows import ParameterRow
from parallelize.torch_private import torch_tensors as private


@dataclass(frozen=True)
class ShardInfo:
    """How one parameter is sharded: the global ranks, the full shape, and the slices that each rank stores.

    `ranks[i]` stores `layout.slices(i)`. Checkpoints write the same pairs.

    Attributes:
        fqn: the name of the parameter. A tied parameter has one `ShardInfo` for each of its names.
        ranks: the global ranks of the tp group, in the order of the group.
        layout: which slices of the full tensor each rank of the group stores.
        names: all names of the parameter on this rank; several if it is tied (`tied_names` has those on other stages too).
    """

    fqn: str
    ranks: tuple[int, ...]
    layout: Layout
    names: tuple[str, ...] = ()

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full parameter."""
        return self.layout.shape

    def slices(self, rank: int) -> tuple[SlicePair, ...]:
        """The (local, full) pairs of slices that the global rank `rank` stores."""
        return self.layout.slices(self.ranks.index(rank))

    def multiplicity(self, pair: SlicePair) -> int:
        """The number of ranks that store the elements of `pair`, which is one of `slices(rank)`."""
        return sum(any(pair.full == other.full for other in self.slices(rank)) for rank in self.ranks)


def join_tied_slots(module: nn.Module) -> None:
    """Let the slots of one parameter in several planned modules deliver its gradient once, when backward ends.

    A plan knows its ties. Modules that were planned in several calls, or were tied after it, deliver one gradient each, of which a
    reducer would send the first one before the others are there.
    """
    slots: dict[int, list[ParameterSlot]] = {}
    for owner in module.modules():
        planned = applied(owner).planned
        for slot in planned.slots if planned is not None else ():
            slots.setdefault(id(owner._parameters.get(slot.key)), []).append(slot)
    for first, *others in slots.values():
        for slot in others:
            first.tied = slot.tied = True
            slot.pending_reductions = first.pending_reductions


def shared_of_parameters(module: nn.Module) -> dict[int, Shared]:
    """id of a parameter -> (dim, start, stop, multiplicity) of the local intervals that other tp ranks store too.

    It is read from the slots of the planned modules, so that it is right under wrappers and for ZeRO's own parameters too.
    """
    shared = {}
    for owner in module.modules():
        planned = applied(owner).planned
        for slot in planned.slots if planned is not None else ():
            if slot.shared:
                shared[id(owner._parameters[slot.key])] = slot.shared
    return shared


def shared_of(layout: Layout, rank: int) -> Shared:
    return tuple((layout.dim or 0, start, stop, len(ranks)) for start, stop, ranks in layout.shared(rank))


def shard_info(module: nn.Module) -> dict[str, ShardInfo]:
    """Parameter name -> how it is sharded over `tp`, for every DTensor parameter.

    Args:
        module: a model that `parallelize_module` returned.

    Returns: a `ShardInfo` by parameter name. A tied parameter is listed under each of its names.
    Raises: ModelError `not-parallelized`.
    Cost: no communication.
    """
    return {
        name: ShardInfo(name, group.ranks, layout, names)
        for layout, group, names in _planned_parameters(module)
        for name in names
    }


def _planned_parameters(module: nn.Module) -> Iterator[tuple[Layout, Group, tuple[str, ...]]]:
    """(layout, group, names) of each parameter, from the plan or, after a dict of styles, from its placements."""
    record = record_of(module)
    rows = rows_by_name(record) if record is not None else {}
    if record is not None:
        planned = {row.fqn: row for row in rows.values()}
        yield from ((row.layout, record.group_for(row), row.fact.names) for row in planned.values())
    names: dict[int, list[str]] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor) and name not in rows:
            names.setdefault(id(parameter), []).append(name)
    if not names and record is None:
        raise not_parallelized(module)
    groups: dict[Any, Group] = {}
    for aliases in names.values():
        dtensor: Any = parameters[aliases[0]]
        mesh = dtensor.device_mesh
        group = groups.setdefault(mesh, layout_group(mesh))
        dim = private.shard_dim(dtensor.placements[-1])
        shape = tuple(dtensor.shape)
        layout = replicated(shape, group.size) if dim is None else chunked(shape, dim, group.size)
        yield layout, group, tuple(aliases)


def full_parameter(module: nn.Module, fqn: str, value: Any = None) -> torch.Tensor:
    """A parameter in its original order and shape, on every rank of `tp`. A collective: call it on all of them.

    Args:
        module: a model that `parallelize_module` returned.
        fqn: the name of the parameter.
        value: a DTensor stored like the parameter (its gradient, an optimizer state) to unshard instead.

    Returns: a full tensor on the parameter's device. A parameter that is no DTensor is returned itself.
    Raises: ModelError `not-parallelized`, AttributeError for a name that the model does not have.
    Cost: one all-gather over `tp` of the parameter's bytes, and one over each axis that ZeRO shards it over.
    """
    stored = module.get_parameter(fqn) if value is None else value
    if not isinstance(stored, DTensor):
        return stored
    layout, group = next((layout, group) for layout, group, names in _planned_parameters(module) if fqn in names)
    return unshard(stored, layout, group)


def full_state_dict(module: nn.Module, *, every_rank: bool = False) -> dict[str, torch.Tensor]:
    """The full state dict on the CPU, in the original order: what the unsharded model's `load_state_dict` takes.

    A collective: call it on every rank. Tensors are unsharded one at a time; tied parameters stay one tensor.

    Args:
        module: a model, parallelized or not.
        every_rank: return the state dict on every rank. Otherwise only rank 0 returns it.

    Returns: full CPU tensors by name; an empty dict on ranks other than 0 unless `every_rank` is set.
    Cost: an all-gather of every sharded tensor's bytes, on every rank, over the axes that shard it.
    """
    returned_here = every_rank or dist.get_rank() == 0
    full_by_id: dict[int, torch.Tensor] = {}
    full_state = {}
    state = module.state_dict()
    for name, value in state.items():
        if id(value) not in full_by_id:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            full_by_id[id(value)] = full.detach().cpu() if returned_here else full.new_empty(0)
        if returned_here:
            full_state[name] = full_by_id[id(value)]
    return full_state


def full_gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameter name -> its full gradient on every rank, for every parameter that has one. Tied parameters have one name.

    Args:
        module: a model that `parallelize_module` returned, or any other.

    Returns: full gradients by parameter name, in original order, on the parameter's device.
    Cost: one all-gather over `tp` of every sharded gradient's bytes, and one over each axis that ZeRO shards it over. Call
        it on every rank.
    """
    gradients = {}
    record = record_of(module)
    any_sharded = record is not None or any(isinstance(parameter, DTensor) for parameter in module.parameters())
    rows = _planned_parameters(module) if any_sharded else ()
    planned = {names[0]: (layout, group) for layout, group, names in rows}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            gradients[name] = _full_gradient(parameter, planned.get(name))
    return gradients


def _full_gradient(parameter: Any, planned: tuple[Layout, Group] | None) -> torch.Tensor:
    grad = parameter.grad
    if not isinstance(grad, DTensor):
        return grad.clone()
    # the gradient of a parameter without a layout is a DTensor if ZeRO has sharded it
    return grad.full_tensor() if planned is None or not isinstance(parameter, DTensor) else unshard(grad, *planned)


class Sharder:
    """Replaces full parameters by DTensors, one at a time.

    Args:
        source: the rank whose values are broadcast to those of the layout's axis; None: each rank shards its own.
        dtype, device: dtype and device of the stored parameters; None: unchanged.
    """

    def __init__(self, source: int | None, dtype: torch.dtype | None, device: torch.device | str | None):
        self.source, self.dtype, self.device = source, dtype, device
        self._specs: dict[tuple[Any, ...], Any] = {}  # of DTensors that layers have alike

    def shard(self, module: nn.Module, resolved: ResolvedPlan, axis_of: Callable[[ParameterRow], DeviceMesh]) -> None:
        """axis_of: the axis of the mesh that a row's layout is over."""
        modules = dict(module.named_modules(remove_duplicate=False))
        for row in resolved.parameters.values():
            if row.plain:
                continue
            owner, _, key = row.fqn.rpartition(".")
            new = self.parameter(modules[owner]._parameters[key], row.layout, axis_of(row))
            for name in row.fact.names:
                owner, _, key = name.rpartition(".")
                modules[owner]._parameters[key] = new

    def parameter(self, full: Any, layout: Layout, axis: DeviceMesh) -> nn.Parameter:
        """The DTensor parameter for a full one, with the same flags and attributes."""
        group = Group(axis.get_group())
        dtype = self.dtype if self.dtype is not None and full.is_floating_point() else full.dtype
        device = full.device if full.is_meta or self.device is None else torch.device(self.device)
        data = full.detach()
        if not full.is_meta and self.source is not None and group.size > 1:
            data = data.to(axis.device_type).clone(memory_format=torch.contiguous_format)
            group.broadcast(data, self.source)
        local = store(data, layout, group.rank).to(device=device, dtype=dtype)
        new = nn.Parameter(self._dtensor(local, layout, axis), requires_grad=full.requires_grad)
        new.__dict__.update(full.__dict__)
        mark_parameter(new, own=True, shared=shared_of(layout, group.rank))
        return new

    def _dtensor(self, stored: torch.Tensor, layout: Layout, axis: DeviceMesh) -> DTensor:
        """As `as_dtensor`, with one spec for all layers, since a spec is most of what that costs."""
        key = (layout.shape, layout.dim, axis, stored.dtype)
        if key not in self._specs:
            first = as_dtensor(stored, layout, axis)
            self._specs[key] = private.spec_of(first)
            return first
        return with_layout(private.wrap(stored, self._specs[key]), layout)


def as_dtensor(stored: torch.Tensor, layout: Layout, tp: DeviceMesh) -> DTensor:
    """A DTensor around a stored shard."""
    placement = Replicate() if layout.dim is None else Shard(layout.dim)
    return with_layout(from_local(stored, layout.shape, placement, tp), layout)


def from_local(local: torch.Tensor, shape: tuple[int, ...], placement: Any, tp: DeviceMesh) -> DTensor:
    """A DTensor of a known full shape, which cannot be derived from uneven shards."""
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return DTensor.from_local(
        local, tp, [placement], run_check=False, shape=torch.Size(shape), stride=tuple(reversed(strides))
    )


def reshard_like(full: torch.Tensor, layout: Layout, parameter: Any) -> DTensor:
    """A full tensor as a DTensor that is stored like `parameter`, also where ZeRO shards it. No communication."""
    return wrap_like(parameter, store_like(full.to(device=parameter.device), layout, parameter))


def rows_by_name(record: PlanRecord) -> dict[str, ParameterRow]:
    """Every name of every parameter -> its row of the resolved plan."""
    rows = (row for row in record.resolved.parameters.values() if not row.plain)
    return {name: row for row in rows for name in row.fact.names}
