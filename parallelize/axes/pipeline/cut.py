"""Splits a stock model into pipeline stages: each rank keeps the full module tree, and the parameters of its own
stages.

Modules keep their names and layer numbers; an absent module only loses its parameters and buffers.
`axes/pipeline/stage_forward.py` runs the model's own forward on the remaining modules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from parallelize.axes.pipeline.absent_parameters import drop_parameters
from parallelize.axes.zero.router_loss import refuse_router_loss, share_router_loss
from parallelize.base.errors import MeshError, ModelError, Problem
from parallelize.base.patches.active import refuse_other_copy
from parallelize.comm.groups import Group
from parallelize.comm.handshake import TIMEOUT_S, agree_on
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.choose import plan_or_none
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.resolve import NO_PLAN, resolve
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.schema import Cuts, Plan
from parallelize.plan.stage_ranks import ranks_of_stages
from parallelize.plan.stages import Assignment, Costs
from parallelize.state.guards.guard_table import CUT, Guarded, set_up
from parallelize.state.records import Cut, StageMark, mark_applied, mark_parameter, pipeline_cut, record_of


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
    """Keep only the pipeline stages of this rank, in place. This is the first step on a mesh with an axis `pp`.

    The model's own forward then runs on every stage. Run it by `Pipeline`, or use `parallelize_model` for all steps.

    Args:
        module: the full model, on the meta device or with weights.
        mesh: a mesh with an axis `pp`.
        plan: as in `parallelize_module`; its section `pipeline:` lists the modules. None: chosen by the model; a model
            without a plan is split between the children of its longest list of modules.
        schedule: a name of `build_schedule`; it decides which rank runs which stage.
        stages_per_rank: as in `build_schedule`.
        costs: the costs of units (layers, and the modules before and after them), by pattern or in order; the largest
            cost of a stage is minimized. Default: the number of parameters.
        assignment: the modules of each stage in calling order, in place of `costs` and the lists of the plan.
        cuts: replaces the plan's section `pipeline:`.
        handshake_timeout_s: seconds to wait for other ranks.

    Returns: `module`.

    Raises: before anything is changed, on every rank:
        MeshError: `no-pp-axis`.
        ModelError: `already-cut`, `wrong-order`, `foreign-recompute`.
        PlanError: `no-layers`, `more-stages-than-layers`, `unknown-module`, `repeated-module`, `reused-module`,
            `unassigned-parameter`, `bad-costs`, `every-has-parameters`, `unknown-skip`, `unknown-schedule`,
            `bad-stages-per-rank`, and those of the plan file.
        HandshakeError: the ranks disagree, or one of them failed.

    Cost: one handshake over the mesh. No tensor is sent.
    """
    view = MeshView.of(mesh)
    ranks = ranks_of_stages(schedule, pp_group(view).size, stages_per_rank)
    with agree_on(view, handshake_timeout_s) as agreed:
        refuse_other_copy()
        check_uncut(module)
        chosen = with_cuts(plan_or_none(module, plan), cuts)
        spec, options = view.spec.only("pp"), Options(schedule=schedule, stages_per_rank=stages_per_rank)
        resolved = resolve(
            chosen, describe(module), spec, options, costs=costs, assignment=assignment, stage_ranks=ranks
        )
        agreed |= resolved.structure()
    return cut_to_stages(module, view, resolved)


def cut_to_stages(module: nn.Module, mesh: MeshView, resolved: ResolvedPlan) -> nn.Module:
    """Keep only the stages of this rank, in place, of a model that `check_uncut` accepts."""
    group = pp_group(mesh)
    local_stages = tuple(stage for stage, rank in enumerate(resolved.stage_ranks) if rank == group.rank)
    cut = Cut(resolved, local_stages, group, mesh)
    for unit in cut.stages.units:
        if cut.stages.stage_of_unit(unit) not in local_stages:
            _empty(module, unit)
    mark_applied(module, cut=cut, resolved=resolved)
    set_up(CUT, Guarded(module, mesh))
    share_router_loss(module)
    for parameter in module.parameters():
        mark_parameter(parameter, stage=StageMark(group))
    return module


def with_cuts(plan: Plan | None, cuts: Cuts | None) -> Plan | None:
    """The plan with the caller's section `pipeline:`."""
    return plan if cuts is None else replace(plan or NO_PLAN, cuts=cuts)


def pp_group(mesh: MeshView) -> Group:
    """The group of `pp`. Raises: MeshError `no-pp-axis`."""
    if "pp" not in mesh.spec.names:
        fix = 'name one: build_mesh("cuda", pp=2, dp=4)'
        raise MeshError(Problem("no-pp-axis", f"the mesh {mesh.spec} has no axis named pp", fix=fix))
    return mesh.group("pp")


def check_uncut(module: nn.Module) -> None:
    """Raises: ModelError `already-cut`, `wrong-order`, `foreign-recompute`, `router-loss`."""
    refuse_router_loss(module)
    if pipeline_cut(module) is not None:
        raise ModelError(
            Problem(
                "already-cut", f"{type(module).__name__} is split into stages already", fix="call cut_pipeline once"
            )
        )
    if record_of(module) is not None or any(isinstance(p, DTensor) for p in module.parameters()):
        what = f"{type(module).__name__} has a plan: a model is split into stages before its plan is applied"
        fix = "use this order: cut_pipeline, parallelize_module, recompute, ZeRO"
        raise ModelError(Problem("wrong-order", what, fix=fix))
    for name, inner in module.named_modules():
        if inner.__dict__.get("gradient_checkpointing") is True:
            fix = "turn it off, and use parallelize.recompute, which supports stages"
            raise ModelError(
                Problem("foreign-recompute", f"{name or 'the model'} has gradient checkpointing on", fix=fix)
            )


def _empty(module: nn.Module, unit: str) -> None:
    """Drop the parameters and buffers of an absent unit, which is a module or a single parameter."""
    parent_name, _, key = unit.rpartition(".")
    parent = module.get_submodule(parent_name)
    if key in parent._parameters:
        # a forward that reads it gets zeros of its shape, which take the memory of one element
        absent: Any = parent._parameters.pop(key)
        zeros = torch.zeros((), dtype=absent.dtype, device=_device_with_values(absent.device))
        parent.__dict__[key] = zeros.expand(absent.shape)
        return
    drop_parameters(module.get_submodule(unit))


def _device_with_values(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device
