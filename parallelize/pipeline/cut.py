"""Cutting a stock model into pipeline stages: each rank keeps the parameters of its own stages, and the whole module tree.

Names and layer numbers stay what they are, because modules stay where they are; an absent module only loses its parameters
and buffers. How the model's own forward runs on what is left: `pipeline/units.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelize.errors import MeshError, ModelError, Problem
from parallelize.groups import Group, mesh_spec
from parallelize.handshake import TIMEOUT_S, agree_on
from parallelize.parameters import STAGE, StageMark
from parallelize.pipeline.schedules import stage_places
from parallelize.plan.choose import plan_or_none
from parallelize.plan.model import ModelFacts, describe
from parallelize.plan.resolve import for_base_model
from parallelize.plan.schema import Cuts, Plan
from parallelize.plan.stages import Assignment, Costs, Stages, cut_stages


@dataclass(frozen=True)
class Cut:
    """What `cut_pipeline` did to a model; kept on its root.

    Attributes:
        stages: of the whole model. places: the pp rank of each stage. mine: the stages of this rank, in order.
        facts: names, shapes and ties of the whole model, as it was.
    """

    stages: Stages
    places: tuple[int, ...]
    mine: tuple[int, ...]
    facts: ModelFacts
    group: Group
    mesh: DeviceMesh

    def present(self, fqn: str) -> bool:
        """Whether a module or parameter (by any of its names) is on this rank."""
        stage = self.stages.stage_of(fqn)
        return stage is None or stage in self.mine

    def __deepcopy__(self, memo: dict) -> Cut:
        return self


def cut_of(module: nn.Module) -> Cut | None:
    """What `cut_pipeline` did to this model, or None."""
    return module.__dict__.get("_parallelize_cut")


def part_of(model: ModelFacts) -> ModelFacts:
    """The facts of what is on this rank."""
    cut = cut_of(model.root)
    return model if cut is None else model.restricted(cut.present, model.objects)


def cut_pipeline(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Any = None,
    *,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    costs: Costs | None = None,
    assignment: Assignment | None = None,
    cuts: Cuts | None = None,
    handshake_timeout_s: float = TIMEOUT_S,
) -> nn.Module:
    """Keep only this rank's pipeline stages of a model, in place, and return it. The first step on an N-D mesh.

    The model's own forward then runs on every stage; run it by `Pipeline`, or use `parallelize_model` for all of it.

    Args:
        module: a whole model, on meta or with weights.
        mesh: its axis named `pp`.
        plan: as for `parallelize_module`; its `pipeline:` says where to cut. Without one: between the longest list.
        schedule, stages_per_rank: which stages lie on which rank depends on them.
        costs: of units (layers, and what stands before and after them), by name or in order. Default: parameter counts.
        assignment: the modules of each stage, explicitly.
        cuts: what a plan's `pipeline:` says, for a model without a plan.

    Raises: PlanError of `plan.stages`, MeshError `no-pp-axis`, ModelError `already-cut`, `wrong-order`,
        HandshakeError, before anything is changed.
    """
    group = Group(_pp_group(mesh))
    places = stage_places(schedule, group.size, stages_per_rank)
    with agree_on(mesh, handshake_timeout_s) as facts_of_ranks:
        _check_order(module)
        facts = describe(module)
        chosen = plan_or_none(module, plan)
        chosen = chosen and for_base_model(chosen, facts)
        if cuts is not None:
            chosen = replace(chosen or Plan("cuts", ()), cuts=cuts)
        stages = cut_stages(chosen, facts, len(places), costs=costs, assignment=assignment)
        facts_of_ranks |= {"stages": str(stages.starts), "units": str(stages.units), "places": str(places)}
        facts_of_ranks |= {f"parameter {key}": value for key, value in facts.structure().items()}
    mine = tuple(stage for stage, rank in enumerate(places) if rank == group.rank)
    cut = Cut(stages, places, mine, facts, group, mesh)
    for unit in stages.units:
        if stages.stage_of_unit(unit) not in mine:
            _empty(module, unit)
    module.__dict__["_parallelize_cut"] = cut
    for parameter in module.parameters():
        setattr(parameter, STAGE, StageMark(group))
    return module


def _pp_group(mesh: DeviceMesh) -> Any:
    if "pp" not in mesh_spec(mesh).names:
        fix = 'name one: build_mesh("cuda", pp=2, dp=4)'
        raise MeshError(Problem("no-pp-axis", f"the mesh {mesh_spec(mesh)} has no axis named pp", fix=fix))
    return mesh.get_group("pp")


def _check_order(module: nn.Module) -> None:
    if cut_of(module) is not None:
        raise ModelError(Problem("already-cut", f"{type(module).__name__} is cut into stages", fix="cut a model once"))
    if "_parallelize_record" in module.__dict__ or any(isinstance(p, DTensor) for p in module.parameters()):
        what = f"{type(module).__name__} has a plan: stages are cut before it is applied"
        raise ModelError(Problem("wrong-order", what, fix="cut_pipeline, parallelize_module, recompute, ZeRO: in turn"))
    for name, inner in module.named_modules():
        if inner.__dict__.get("gradient_checkpointing") is True:
            fix = "leave it off, and use parallelize.recompute, which knows about stages"
            raise ModelError(
                Problem("foreign-recompute", f"{name or 'the model'} has gradient checkpointing on", fix=fix)
            )


def _empty(module: nn.Module, unit: str) -> None:
    """Drop the parameters and buffers of an absent unit, which may be a module or a parameter by itself."""
    owner, _, key = unit.rpartition(".")
    holder = module.get_submodule(owner)
    if key in holder._parameters:
        # a forward that reads it gets zeros of its shape, at the cost of one element
        gone: Any = holder._parameters.pop(key)
        holder.__dict__[key] = torch.zeros((), dtype=gone.dtype, device=_real(gone.device)).expand(gone.shape)
        return
    for inner in module.get_submodule(unit).modules():
        for name in inner._parameters:
            inner._parameters[name] = None
        for name in inner._buffers:
            inner._buffers[name] = None


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device
