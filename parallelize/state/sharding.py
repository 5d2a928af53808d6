"""Full parameters to DTensors and back, as the layout says.

A layout that `Shard(dim)` cannot express (packed projections, key/value heads that several ranks store) is stored as an
even `Shard` of permuted elements. Shards are padded at the end where ranks store different numbers of them.
`full_parameter` and the state dict return the original order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelize.base.layout import Layout
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.broadcasts import broadcast_together, messages
from parallelize.comm.groups import Group
from parallelize.plan.options import STANDARD
from parallelize.plan.resolved import ParameterRow, ResolvedPlan
from parallelize.state.layout_tensor.layout_dtensor import with_layout, wrap_like
from parallelize.state.layout_tensor.layout_shard import store, store_like
from parallelize.state.records import PlanRecord, Shared, applied, mark_parameter
from parallelize.state.step_results import ParameterSlot


def join_tied_slots(module: nn.Module) -> None:
    """Let the slots of one parameter in several planned modules deliver its gradient once, when backward ends.

    A plan knows its ties. Modules that were planned in several calls, or were tied after it, each deliver a
    gradient of their own, and a reducer would send the first before the rest arrive.
    """
    slots: dict[int, list[ParameterSlot]] = {}
    for owner in module.modules():
        planned = applied(owner).planned
        for slot in planned.slots if planned is not None else ():
            slots.setdefault(id(owner._parameters.get(slot.key)), []).append(slot)
    for first, *copies in slots.values():
        for slot in copies:
            first.tied = slot.tied = True
            slot.pending_reductions = first.pending_reductions


def shared_of_parameters(module: nn.Module) -> dict[int, Shared]:
    """id of a parameter -> (dim, start, stop, multiplicity) of the local intervals that other tp ranks store too.

    It is read from the slots of the planned modules, so that it is right under wrappers and for ZeRO's own parameters
    too.
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


class Unsharded(NamedTuple):
    """A full parameter, the layout in which it is to be stored, and the axis of the mesh that the layout is over."""

    full: Any
    layout: Layout
    axis: DeviceMesh

    @property
    def group(self) -> Group:
        return Group(self.axis.get_group())


class Sharder:
    """Replaces full parameters by DTensors.

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
        rows = [row for row in resolved.parameters.values() if not row.plain]
        unsharded = []
        for row in rows:
            owner, _, key = row.fqn.rpartition(".")
            unsharded.append(Unsharded(modules[owner]._parameters[key], row.layout, axis_of(row)))
        for index, new in self.parameters(unsharded):
            for name in rows[index].fact.names:
                owner, _, key = name.rpartition(".")
                modules[owner]._parameters[key] = new

    def parameters(self, unsharded: Sequence[Unsharded]) -> Iterator[tuple[int, nn.Parameter]]:
        """(index, the DTensor parameter) for each full one, with the same flags and attributes, as values arrive.

        Cost: a broadcast of each entry of `broadcasts.messages`.
        """
        sent = []
        groups = [item.group for item in unsharded]
        for index, (item, group) in enumerate(zip(unsharded, groups, strict=True)):
            if item.full.is_meta or self.source is None or group.size == 1:
                yield index, self._stored(item, item.full.detach(), group.rank)
            else:
                sent.append(index)
        for message in messages([unsharded[n].full.detach() for n in sent], [groups[n] for n in sent]):
            yield from self._arrived(unsharded, [sent[number] for number in message], groups[sent[message[0]]])

    def _arrived(
        self, unsharded: Sequence[Unsharded], indices: list[int], group: Group
    ) -> Iterator[tuple[int, nn.Parameter]]:
        """The parameters of one message, which is freed before the next one."""
        assert self.source is not None
        tensors = [unsharded[index].full.detach() for index in indices]
        device = unsharded[indices[0]].axis.device_type
        values = broadcast_together(tensors, group, self.source, device)
        for index, value in zip(indices, values, strict=True):
            yield index, self._stored(unsharded[index], value, group.rank)

    def _stored(self, unsharded: Unsharded, data: torch.Tensor, rank: int) -> nn.Parameter:
        """The parameter of this rank. data: the values that count, of the full parameter."""
        full, layout, axis = unsharded
        dtype = self.dtype if self.dtype is not None and full.is_floating_point() else full.dtype
        device = full.device if full.is_meta or self.device is None else torch.device(self.device)
        local = store(data, layout, rank).to(device=device, dtype=dtype)
        new = private.parameter_of(self._dtensor(local, layout, axis), full.requires_grad)
        new.__dict__.update(full.__dict__)
        mark_parameter(new, own=True, shared=shared_of(layout, rank))
        return new

    def _dtensor(self, stored: torch.Tensor, layout: Layout, axis: DeviceMesh) -> DTensor:
        """As `as_dtensor`, with one spec for all layers, since a spec is most of what that costs; and on the device of
        `stored`, where `from_local` moves a tensor to that of the mesh."""
        key = (layout.shape, layout.dim, axis, stored.dtype)
        if key not in self._specs:
            self._specs[key] = private.spec_of(as_dtensor(stored, layout, axis))
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


# -- storage ---------------------------------------------------------------------------------------------------------
# How parameters are stored, as the caller of `parallelize_module` says.


@dataclass(frozen=True)
class Storage:
    """How parameters are stored; see `parallelize_module`."""

    src_data_rank: int | None = 0
    weights_dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    check_replicated: bool | None = None
    compare_every: int = STANDARD.compare_every

    @property
    def compares(self) -> bool:
        """Whether parameters that become replicated DTensors are compared; by default, where they are not broadcast."""
        return self.src_data_rank is None if self.check_replicated is None else self.check_replicated

    @property
    def compare_inputs_every(self) -> int:
        """Forwards between comparisons of the inputs; 0: none."""
        return {True: 1, None: self.compare_every, False: 0}[self.check_replicated]

    def facts(self) -> dict[str, str]:
        """What every rank must have been given alike."""
        return {
            "option weights_dtype": str(self.weights_dtype),
            "option src_data_rank": str(self.src_data_rank),
            "option check_replicated": str(self.check_replicated),
        }
