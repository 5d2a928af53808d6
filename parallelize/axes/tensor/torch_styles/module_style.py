"""What all styles share: the module they are applied to, its parameters as DTensors, and their slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from parallelize.axes.tensor.placements import local_input
from parallelize.axes.tensor.planned_forward import ModuleRuntime
from parallelize.axes.tensor.shared_input import SharedConversion
from parallelize.base.errors import ModelError, PlanError, Problem
from parallelize.base.layout import Layout
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.comm.meshes import tp_mesh
from parallelize.plan.model_facts import describe
from parallelize.plan.styles.style import ModuleFacts
from parallelize.state.parameters import Slot
from parallelize.state.pending_reductions import PendingReduction, PendingReductions
from parallelize.state.records import applied
from parallelize.state.sharding import Sharder

ParallelStyle: Any = private.parallel_style_class()


@dataclass(frozen=True)
class Target:
    """What a style is applied to: one module on one mesh. `conversions`: of the column linears of one model, by input layout."""

    module: nn.Module
    facts: ModuleFacts
    mesh: DeviceMesh
    group: Group
    sharder: Sharder
    pending_reductions: PendingReductions
    conversions: dict[Placement, SharedConversion]

    def column_conversion(self, source: Placement) -> SharedConversion:
        """The conversion of an input to a full plain tensor whose gradient is one term of a sum."""
        if source not in self.conversions:
            desired = Replicate()
            convert = partial(
                local_input, mesh=self.mesh, group=self.group, source=source, desired=desired, partial_grad=True
            )
            self.conversions[source] = SharedConversion(convert)
        return self.conversions[source]


class ModuleStyle(ParallelStyle):
    """The base of the styles of this package. `_apply` is what PyTorch's `parallelize_module` calls."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = tp_mesh(device_mesh)
        self.install(target_of(module, "", mesh, PendingReductions(), getattr(self, "src_data_rank", 0), {}))
        return module

    def check(self, facts: ModuleFacts, module: nn.Module) -> None:
        """Raises: ModelError where the style does not support the module."""

    def install(self, target: Target) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        attributes = ", ".join(f"{key}={value!r}" for key, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({attributes})"


def target_of(
    module: nn.Module,
    fqn: str,
    mesh: DeviceMesh,
    pending_reductions: PendingReductions,
    source: int | None,
    conversions: dict[Placement, SharedConversion],
) -> Target:
    """Raises: ModelError `already-parallelized`."""
    group = Group(mesh.get_group())
    facts = replace(describe(module).modules[""], fqn=fqn)
    planned = applied(module).planned
    if planned is not None and planned.slots:
        raise ModelError(Problem("already-parallelized", f"{fqn or type(module).__name__} has a style already"))
    sharder = Sharder(source, None, None)
    return Target(module, facts, mesh, group, sharder, pending_reductions, conversions)


def planned_of(target: Target, layouts: dict[str, Layout], partial_keys: tuple[str, ...] = ()) -> ModuleRuntime:
    """Shard the module's parameters and make slots for them.

    Args:
        layouts: of each parameter. partial_keys: the parameters whose gradients are summed over ranks.
    """
    slots = []
    for order, (key, layout) in enumerate(layouts.items()):
        parameter: Any = target.module._parameters[key]
        if isinstance(parameter, DTensor):  # tied, and already sharded by another rule
            _check_tie(target, key, parameter, layout)
        else:
            target.module._parameters[key] = target.sharder.parameter(parameter, layout, target.mesh)
        is_partial = key in partial_keys and target.group.size > 1
        reduction = PendingReduction(order, ((target.group, None, 0, 0),)) if is_partial else None
        slots.append(Slot(key, None, reduction, target.pending_reductions))
    return ModuleRuntime(tuple(slots), target.module.__dict__.get("forward"))


def _check_tie(target: Target, key: str, tied: DTensor, layout: Layout) -> None:
    placement = Replicate() if layout.dim is None else Shard(layout.dim)
    if tied.placements != (placement,):
        raise PlanError(
            Problem(
                "broken-tie",
                f"{target.facts.fqn}.{key} is tied, and its rules split it as {tied.placements[0]} and {placement}",
                fix="split the same dim: RowwiseParallel for the embedding, ColwiseParallel for the head",
            )
        )


def require_kind(style: Any, facts: ModuleFacts, kinds: tuple[str, ...]) -> None:
    """Raises: ModelError `wrong-module-for-style`."""
    if facts.kind not in kinds:
        raise ModelError(
            Problem(
                "wrong-module-for-style",
                f"{type(style).__name__} needs a {' or '.join(kinds)}; {facts.fqn!r} is a {facts.class_name}",
                fix="name the module that has the weight",
            )
        )
