"""What every style here shares: the module it works on, its parameters as DTensors, its slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelize import _torch_private as private
from parallelize.errors import ModelError, PlanError, Problem
from parallelize.forwards import Planned
from parallelize.gradients import Debt, Ledger
from parallelize.groups import Group, tp_mesh
from parallelize.layout import Layout
from parallelize.parameters import Slot
from parallelize.plan.model import describe
from parallelize.sharding import Sharder
from parallelize.styles.registry import ModuleFacts

ParallelStyle: Any = private.parallel_style_class()


@dataclass(frozen=True)
class Target:
    """What a style works with: one module on one mesh."""

    module: nn.Module
    facts: ModuleFacts
    mesh: DeviceMesh
    group: Group
    sharder: Sharder
    ledger: Ledger


class Style(ParallelStyle):
    """Ours: `_apply` is what PyTorch's own function would call."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = tp_mesh(device_mesh)
        self.install(target_of(module, "", mesh, Ledger(), getattr(self, "src_data_rank", 0)))
        return module

    def check(self, facts: ModuleFacts, module: nn.Module) -> None:
        """Raises: ModelError where the style cannot serve the module."""

    def install(self, target: Target) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        inside = ", ".join(f"{key}={value!r}" for key, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({inside})"


def target_of(module: nn.Module, fqn: str, mesh: DeviceMesh, ledger: Ledger, source: int | None) -> Target:
    group = Group(mesh.get_group())
    facts = replace(describe(module).modules[""], fqn=fqn)
    if "_planned" in module.__dict__ and module.__dict__["_planned"].slots:
        raise ModelError(Problem("already-parallelized", f"{fqn or type(module).__name__} has a style already"))
    return Target(module, facts, mesh, group, Sharder(mesh, group, source, None, None), ledger)


def planned_of(target: Target, layouts: dict[str, Layout], partial_keys: tuple[str, ...] = ()) -> Planned:
    """Shard the module's parameters and give it slots for them."""
    slots = []
    for order, (key, layout) in enumerate(layouts.items()):
        held: Any = target.module._parameters[key]
        if isinstance(held, DTensor):  # a tied one, which another rule has sharded
            _check_tie(target, key, held, layout)
        else:
            target.module._parameters[key] = held = target.sharder.parameter(held, layout)
        owed = key in partial_keys and target.group.size > 1
        debt = Debt(order, ((target.group, None, 0, 0),)) if owed else None
        slots.append(Slot(key, None, debt, target.ledger))
    return Planned(tuple(slots), target.module.__dict__.get("forward"))


def _check_tie(target: Target, key: str, held: DTensor, layout: Layout) -> None:
    wanted = Replicate() if layout.dim is None else Shard(layout.dim)
    if held.placements != (wanted,):
        raise PlanError(
            Problem(
                "broken-tie",
                f"{target.facts.fqn}.{key} is tied, and its rules split it as {held.placements[0]} and {wanted}",
                fix="split the same dim: RowwiseParallel for the embedding, ColwiseParallel for the head",
            )
        )


def need(style: Any, facts: ModuleFacts, kinds: tuple[str, ...]) -> None:
    if facts.kind not in kinds:
        raise ModelError(
            Problem(
                "wrong-module-for-style",
                f"{type(style).__name__} needs a {' or '.join(kinds)}; {facts.fqn!r} is a {facts.class_name}",
                fix="name the module that holds the weight",
            )
        )
