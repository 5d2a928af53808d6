"""A model, its plan and a setting, resolved: everything that explaining, comparing and fitting have in common.

The model lies on meta, the plan is resolved by arithmetic, and one microbatch is recorded for each tp size and mode; meshes
that differ in other axes share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from parallelize.analysis.fake_world import fake_mesh
from parallelize.analysis.likeness import Alike, consistent, likenesses
from parallelize.analysis.recording import Modes, Work, record
from parallelize.analysis.records import Trace
from parallelize.analysis.setting import Setting, check_setting
from parallelize.analysis.shares import Share, shares_of
from parallelize.analysis.step import RankStep
from parallelize.errors import ModelError, PlanError, Problem
from parallelize.mesh import MeshSpec
from parallelize.model_source import ModelSource
from parallelize.pipeline.schedules import Schedule, stage_places
from parallelize.plan.choose import plan_of, plan_or_none
from parallelize.plan.model import ModelFacts, describe
from parallelize.plan.pattern import matches
from parallelize.plan.resolve import ResolvedPlan, for_base_model, resolve
from parallelize.plan.schema import Plan
from parallelize.plan.stages import Stages, cut_stages


@dataclass
class Subject:
    """What is asked about: a model and a plan. Recordings are kept for the next question."""

    source: ModelSource
    plan: Any = None
    _facts: dict[str, ModelFacts] = field(default_factory=dict)
    _traces: dict[tuple, Trace] = field(default_factory=dict)
    _resolved: dict[tuple, ResolvedPlan] = field(default_factory=dict)
    _stages: dict[tuple, Stages | None] = field(default_factory=dict)
    _shares: dict[tuple, list[Share]] = field(default_factory=dict)
    irregular: bool = False  # layers of one kind were seen to differ, so every layer is run

    def model(self, weights_dtype: str) -> ModelFacts:
        """Names and shapes."""
        if weights_dtype not in self._facts:
            self._facts[weights_dtype] = describe(self.source.build("meta", dtype=getattr(torch, weights_dtype)))
        return self._facts[weights_dtype]

    def plan_for(self, setting: Setting) -> Plan | None:
        """The plan with the setting's choices; None where the mesh has no `tp` and none is needed.

        Raises: PlanError.
        """
        root = self.model(setting.weights_dtype).root
        needed = "tp" in setting.mesh.names or setting.size("cp") > 1
        found = plan_of(root, self.plan) if needed else plan_or_none(root, self.plan)
        if found is None:
            return None
        choices = {"sequence_parallel": setting.sequence_parallel, "loss_parallel": setting.loss_parallel}
        return found.with_options(**choices, overlap=setting.overlap, fuse_loss=setting.fuse_loss)

    def resolved(self, setting: Setting) -> ResolvedPlan | None:
        """The rows that would be applied. Raises: PlanError with every problem."""
        plan = self.plan_for(setting)
        if plan is None or "tp" not in setting.mesh.names:
            return None
        key = (setting.weights_dtype, setting.size("tp"), plan.digest())
        if key not in self._resolved:
            self._resolved[key] = resolve(plan, self.model(setting.weights_dtype), setting.size("tp"))
        return self._resolved[key]

    def stages(self, setting: Setting) -> Stages | None:
        """How the model is cut; None where it has no layers (and needs none)."""
        count = len(self.places(setting))
        key = (setting.weights_dtype, count)
        if key not in self._stages:
            model, plan = self.model(setting.weights_dtype), self.plan_for(setting)
            base = for_base_model(plan, model) if plan is not None else None
            try:
                self._stages[key] = cut_stages(base, model, count)
            except PlanError:
                if count > 1:
                    raise
                self._stages[key] = None
        return self._stages[key]

    def places(self, setting: Setting) -> tuple[int, ...]:
        """The pp rank of each stage."""
        size = setting.size("pp")
        return (0,) if size == 1 else stage_places(setting.schedule, size, setting.stages_per_rank)

    def layers(self, setting: Setting) -> list[str]:
        stages = self.stages(setting)
        if stages is None:
            return []
        prefix = stages.cuts.layers + "." if stages.cuts.layers else ""
        count = len(stages.units) - stages.num_first
        return [
            u for u in stages.units[stages.num_first :][:count] if u.startswith(prefix) and u[len(prefix) :].isdigit()
        ]

    def trace(self, setting: Setting, every_layer: bool = False, halves: bool = False) -> Trace:
        """One microbatch of the model under the setting's tp size and modes.

        Raises: ParallelizeError of the plan; ModelError `cannot-record` where the model's forward cannot run on meta tensors.
        """
        modes = _modes(setting)
        key = (
            setting.size("tp"),
            "tp" in setting.mesh.names,
            setting.size("cp"),
            modes,
            setting.rows,
            setting.sequence,
            setting.weights_dtype,
            every_layer,
            halves,
        )
        if key not in self._traces:
            self._traces[key] = self._record(setting, modes, every_layer, halves)
        return self._traces[key]

    def _record(self, setting: Setting, modes: Modes, every_layer: bool, halves: bool) -> Trace:
        layers = self.layers(setting)
        every = setting.recompute_every if setting.recompute != "off" else 1
        alike = likenesses(layers, self.model(setting.weights_dtype), every)
        if every_layer or self.irregular:
            alike = Alike.none(layers)
        trace = self._run(setting, modes, alike, halves)
        if not consistent(trace, alike):  # layers that look alike and are not: run them all
            self.irregular = True
            trace = self._run(setting, modes, Alike.none(layers), halves)
        return trace

    def _run(self, setting: Setting, modes: Modes, alike: Alike, halves: bool) -> Trace:
        model = self.source.build("meta", dtype=getattr(torch, setting.weights_dtype))
        axes = [(axis, size) for axis, size in setting.mesh.axes if axis == "tp" or (axis == "cp" and size > 1)]
        spec = MeshSpec(axes or [("dp", 1)])
        source, sequence = self.source, setting.sequence
        work = Work(lambda module, rows: source.inputs(module, rows, sequence), setting.rows, source.loss, source.count)
        whole, plan, layers = cut_stages_or_none(self, setting), self.plan_for(setting), self.layers(setting)
        with fake_mesh(spec) as mesh:
            return record(model, mesh, plan, whole, layers, modes, work, alike=alike, halves=halves)

    def rank_step(self, setting: Setting, schedule: Schedule, pp_rank: int, every_layer: bool = False) -> RankStep:
        """The step of one rank of the pipeline."""
        stages, shares = self.stages(setting), self.shares(setting, pp_rank)
        units = self.zero_units(setting) if setting.zero == 3 else ()
        trace = self.trace(setting, every_layer)
        halves = self.trace(setting, every_layer, halves=True) if _splits(setting, schedule) else None
        return RankStep(trace, stages, setting, schedule, shares, pp_rank, units, halves)

    def shares(self, setting: Setting, pp_rank: int) -> list[Share]:
        """What one rank of the pipeline holds."""
        places, resolved = self.places(setting), self.resolved(setting)
        key = (setting.weights_dtype, places, pp_rank, id(resolved))
        if key not in self._shares:
            model = self.model(setting.weights_dtype)
            self._shares[key] = shares_of(model, resolved, self.stages(setting), places, pp_rank)
        return self._shares[key]

    def zero_units(self, setting: Setting) -> Sequence[str]:
        """Modules that ZeRO 3 gathers as one: the plan's, else its layers."""
        plan, model = self.plan_for(setting), self.model(setting.weights_dtype)
        if plan is None:
            return self.layers(setting) if setting.size("pp") > 1 else ()
        if plan.zero_units:
            return [name for name in model.modules if any(matches(pattern, name) for pattern in plan.zero_units)]
        return self.layers(setting)


def cut_stages_or_none(subject: Subject, setting: Setting) -> Stages | None:
    """The units of the whole model, as one stage."""
    stages = subject.stages(setting)
    if stages is None or stages.num_stages == 1:
        return stages
    return replace(stages, starts=(0,))


def _splits(setting: Setting, schedule: Schedule) -> bool:
    """Whether the halves of a backward run apart: as `Pipeline` decides."""
    apart = any(action.kind == "W" for order in schedule.orders for action in order)
    return apart and setting.recompute == "off" and setting.overlap == "off" and setting.zero < 3


def _modes(setting: Setting) -> Modes:
    return Modes(
        setting.sequence_parallel,
        setting.loss_parallel,
        setting.fuse_loss,
        setting.recompute,
        setting.recompute_every,
        setting.recompute_save,
        getattr(torch, setting.dtype) if setting.dtype is not None else None,
        ulysses=setting.ulysses,
    )


def check(subject: Subject, setting: Setting) -> None:
    """Everything that can be wrong, before anything is recorded. Raises: ParallelizeError."""
    check_setting(setting)
    subject.resolved(setting)
    subject.stages(setting)
    scalars = [fact.fqn for fact in subject.model(setting.weights_dtype).parameters.values() if not fact.shape]
    if setting.zero == 3 and scalars:
        what = f"{scalars[0]} is a scalar, which `fully_shard` cannot split"
        raise ModelError(Problem("scalar-parameter", what, fix="make it a tensor of one element, or use zero=2"))
