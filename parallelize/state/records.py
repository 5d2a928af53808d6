"""What was applied to a model: one typed record for each module, and one mark for each parameter, under the same key.

Records are frozen. `mark_applied` replaces the record of a module by one with more fields set, so that a copy of a
module's dictionary (as in `Transaction`) is a copy of what was applied to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.base.patches import active as patches
from parallelize.comm.groups import Group, in_groups
from parallelize.comm.handshake import InputCheck
from parallelize.comm.mesh_view import MeshView
from parallelize.plan.model_facts import ModelFacts, describe
from parallelize.plan.models.wrapped_models import stock_model
from parallelize.plan.resolve import resolve
from parallelize.plan.resolved import ParameterRow, ResolvedPlan
from parallelize.plan.stages import Stages
from parallelize.state.pending_reductions import PendingReductions
from parallelize.state.step_results import (
    DataAxes,
    OverlapOfModel,
    PlannedModule,
    RecomputedModule,
    SequenceRegion,
    ShardedSequences,
    TiedCopies,
)

KEY = "_applied"
"""The key in a module's instance dictionary, and the attribute of a parameter. Forwards read
`self._applied.planned`."""


def axis_of_layout(row: ParameterRow, tp: DeviceMesh, folded: MeshView | None) -> DeviceMesh:
    """The mesh of one axis that a parameter's layout is over."""
    if row.axis == "tp":
        return tp
    assert folded is not None
    return folded.device_mesh["ep"]


@dataclass(frozen=True)
class PlanRecord:
    """What `parallelize_module` did; on the model's root.

    Attributes:
        resolved: the plan of this rank's part of the model; `resolution_of` has that of the full model.
        mesh, tp: the mesh of the job, and its axis `tp`. group: the process group of `tp`.
        folded: the mesh as experts see it, where they are divided over data axes too: see `MeshView.folded`.
        overlap: the call sites where collectives overlap with matmuls. region: that of sequence parallelism.
        inputs: compares the inputs of forwards over `tp`.
    """

    resolved: ResolvedPlan
    mesh: MeshView
    tp: DeviceMesh
    group: Group
    pending_reductions: PendingReductions
    overlap: OverlapOfModel
    region: SequenceRegion | None = None
    inputs: InputCheck | None = None
    folded: MeshView | None = None

    def group_for(self, row: ParameterRow) -> Group:
        """The process group of the axis that a parameter's layout is over."""
        return self.folded.group("ep") if row.axis == "ep" and self.folded is not None else self.group

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanRecord:
        """A copy of a model has a region of its own, which its forwards enter."""
        return replace(self, region=copy.deepcopy(self.region, memo))


@dataclass(frozen=True)
class Cut:
    """What `cut_pipeline` did; on the model's root.

    Attributes:
        resolved: the plan of the full model. local_stages: of this rank, in order.
    """

    resolved: ResolvedPlan
    local_stages: tuple[int, ...]
    group: Group
    mesh: MeshView

    @property
    def stages(self) -> Stages:
        """Of the full model."""
        assert self.resolved.stages is not None
        return self.resolved.stages

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The pp rank of each stage."""
        return self.resolved.stage_ranks

    @property
    def facts(self) -> ModelFacts:
        """Names, shapes and ties of the full model, before it was cut."""
        return self.resolved.facts

    def present(self, fqn: str) -> bool:
        """Whether a module or parameter (by any of its names) is on this rank."""
        stage = self.stages.stage_of(fqn)
        return stage is None or stage in self.local_stages

    def __deepcopy__(self, memo: dict[int, Any]) -> Cut:
        return self


class ForwardStep(NamedTuple):
    """One step of what a module runs; see `forward_steps.py`.

    Attributes:
        place: its place among the steps; empty for a forward that others have set on the instance.
        function: (module, *args, **kwargs) -> output.
        general: what runs in its place where it is a short cut past the forward of the class, and more is inside of it.
    """

    place: str
    function: Callable[..., Any]
    general: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardStep:
        return self  # the state that it reads is on the module


@dataclass(frozen=True, eq=False, slots=True)
class ModuleState:
    """What was applied to one module. A field is None, or empty, until its step has run.

    A field that only the room of its step reads is an `object` here; `step_results.as_instance` gives it back as its
    class.

    Attributes, of the root of a model:
        resolved: the plan of the full model, over the axes that were applied.
        recipe: the initialization that `build_on_meta` recorded: a randomness.init.recipes.Recipe.
        cut: its pipeline stages. plan: its tensor-parallel plan.
        context: its sequences over `cp`. context_call: how its forward is called over `cp`, also of its text part.
        features: how features of images are divided over `cp`, on the model around its text part.
        data: its data axes. router_loss: what counts the tokens of its load-balancing loss. ties: its parameters tied
            across stages.
        dropout_clock: of `install_dropout`: a randomness.dropout.position.Clock. draws: of what its forward draws, a
            randomness.dropout.draw_hooks.DrawHooks.
        batch_part: while a step runs, which sequences the forward gets: an applied.forward_rows.BatchPart.
        route_replay: of `replay_routes`: the choices that its routers get, a tensor.router_choice.RouteReplay.
        recompute_units: its recomputed modules, where the model would make a key/value cache.
    Attributes, of any module:
        name: its name in the model when the plan was applied, of modules whose outputs the first forward looks at.
        steps: what its forward runs, from the innermost step. inner: by place of a step, what that calls; without an
            entry, the forward of the class. instance_forwards: forwards that others have set on it, which steps call.
        planned: what its forward runs with.
        attention: a context.forward_state.ContextAttention. heads: a tensor.flex_heads.HeadShard.
        dropout: a randomness.dropout.call_sites.ModuleDropout.
        recompute_unit: set where it is recomputed.
        absent: shape and dtype, by key, of its parameters where another pipeline stage has them.
        router: of a router whose choices were replaced once: a tensor.router_choice.ReplayedRouter.
        state_rows: the resolved rows of its own parameters, by key, which state dicts are converted by.
        rebuilt_buffers: values of meta buffers that no checkpoint stores, by key.
        gradient_guard: an applied.gradient_guard.GradientGuard, of a module with parameters.
        defers_logits: whether it is a head whose matmul is left to the loss. gathers_logits: whether a graph that a
            compiler traces now gathers its logits. written_weight: under `fully_shard`, the tensor of a deferred head
            that the optimizer updates, and its local tensor.
        lease: keeps what is changed in other libraries, while a planned model lives.
        exporters: those that `export_weights` has built, on the root. plan_later: plans what was added to the model.
        stage_adapters: of a model that was cut into stages: the same, and drops what other stages have, a
            pipeline.stage_adapters.StageAdapters.
    """

    resolved: ResolvedPlan | None = None
    recipe: object = None
    cut: Cut | None = None
    plan: PlanRecord | None = None
    context: ShardedSequences | None = None
    context_call: object = None
    features: object = None
    data: DataAxes | None = None
    router_loss: object = None
    ties: TiedCopies | None = None
    dropout_clock: object = None
    draws: object = None
    batch_part: object = None
    route_replay: object = None
    recompute_units: tuple[RecomputedModule, ...] = ()
    name: str = ""
    steps: tuple[ForwardStep, ...] = ()
    inner: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    instance_forwards: tuple[Callable[..., Any], ...] = ()
    planned: PlannedModule | None = None
    attention: object = None
    heads: object = None
    dropout: object = None
    recompute_unit: RecomputedModule | None = None
    absent: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    router: object = None
    state_rows: Mapping[str, ParameterRow] = field(default_factory=dict)
    rebuilt_buffers: Mapping[str, torch.Tensor | None] = field(default_factory=dict)
    gradient_guard: Any = None
    defers_logits: bool = False
    gathers_logits: bool = False
    written_weight: tuple[torch.Tensor, ...] = ()
    exporters: object = None
    plan_later: Callable[[nn.Module], None] | None = None
    stage_adapters: Callable[[nn.Module], None] | None = None
    lease: patches.Lease | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        return replace(self, **{key: copy.deepcopy(value, memo) for key, value in self._fields().items()})

    def __reduce__(self) -> Any:
        """Raises: ModelError `model-in-groups`: a process group exists on its ranks alone."""
        refers = {key for key, value in self._fields().items() if value and key not in _PICKLED}
        if refers:
            raise in_groups()
        return _restored, (self._fields(),)

    def _fields(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


_PICKLED = {"lease", "name", "resolved", "recipe", "rebuilt_buffers", "route_replay", "router", "exporters"} | {
    "steps",
    "inner",
    "instance_forwards",
}


def _restored(values: dict[str, Any]) -> ModuleState:
    return ModuleState(**values)


_NOT_APPLIED = ModuleState()
_NAMES = tuple(item.name for item in fields(ModuleState))
_values_of = attrgetter(*_NAMES)  # `dataclasses.replace` takes three times as long, for each module of a plan


def applied(module: nn.Module) -> ModuleState:
    """What was applied to this module."""
    return module.__dict__.get(KEY, _NOT_APPLIED)


def mark_applied(module: nn.Module, **fields: Any) -> None:
    """Replace fields of a module's record."""
    kept = zip(_NAMES, _values_of(applied(module)), strict=True)
    module.__dict__[KEY] = ModuleState(**dict(kept) | {"lease": patches.lease()} | fields)


def inside_adapters(module: nn.Module) -> nn.Module:
    """The model on a mesh that adapters of PEFT were put around later; the module itself where it has the records, or
    where there are none."""
    record = applied(module)
    is_bare = all(part is None for part in (record.plan, record.cut, record.data, record.context))
    return stock_model(module) if is_bare else module


def record_of(module: nn.Module) -> PlanRecord | None:
    """The plan that was applied to this model, or None."""
    return applied(module).plan


def resolution_of(module: nn.Module) -> ResolvedPlan | None:
    """The resolved plan of the full model, over the axes that were applied, or None."""
    return applied(module).resolved


def resolution_so_far(module: nn.Module) -> ResolvedPlan:
    """`resolution_of`; of a model to which nothing was applied, that of a mesh without axes."""
    return resolution_of(module) or resolve(None, describe(module), MeshSpec())


def facts_of(module: nn.Module) -> ModelFacts:
    """Names, shapes and ties of the full model: as they are now, or as they were before it was cut into stages."""
    cut = pipeline_cut(module)
    if cut is None:
        return describe(module)
    modules = dict(module.named_modules())  # of a copy of the model, others
    return replace(cut.facts, root=module, objects={fqn: modules[fqn] for fqn in cut.facts.objects})


def require_record(module: nn.Module) -> PlanRecord:
    """Raises: ModelError `not-parallelized`."""
    record = record_of(module)
    if record is None:
        raise not_parallelized(module)
    return record


def not_parallelized(module: nn.Module) -> ModelError:
    return ModelError(
        Problem("not-parallelized", f"{type(module).__name__} has no plan", fix="call parallelize_module first")
    )


def pipeline_cut(module: nn.Module) -> Cut | None:
    """The pipeline stages that this model was cut into, or None."""
    return applied(module).cut


def part_of(module: nn.Module, model: ModelFacts) -> ModelFacts:
    """The facts of this rank's part of the model."""
    cut = pipeline_cut(module)
    return model if cut is None else model.restricted(cut.present, model.objects)


def mesh_of(module: nn.Module) -> MeshView | None:
    """The largest of the meshes that this model was parallelized over, or None."""
    root = applied(module)
    meshes = [record.mesh for record in (root.data, root.cut, root.plan, root.gradient_guard) if record is not None]
    return max(meshes, key=lambda mesh: mesh.size, default=None)


# -- parameters -------------------------------------------------------------------------------------------------------

Shared = tuple[tuple[int, int, int, int], ...]
"""(dim, start, stop, multiplicity) of the local intervals that other tp ranks store too."""


class StageMark(NamedTuple):
    """`group`: of the pipeline. `counted`: False for a copy of a tied parameter that another stage counts."""

    group: Group
    counted: bool = True


class ParameterMark(NamedTuple):
    """What was applied to one parameter.

    own: `parallelize_module` made it, so that nothing reads its gradient before backward has ended.
    shared: the local intervals that other tp ranks store too.
    stage: its pipeline, or None.
    absent: it was added to a layer of another stage, and is the model's no more.
    """

    own: bool = False
    shared: Shared = ()
    stage: StageMark | None = None
    absent: bool = False


_NO_MARK = ParameterMark()


def mark_of(parameter: Any) -> ParameterMark:
    return getattr(parameter, KEY, _NO_MARK)


def mark_parameter(parameter: Any, **fields: Any) -> None:
    setattr(parameter, KEY, mark_of(parameter)._replace(**fields))
