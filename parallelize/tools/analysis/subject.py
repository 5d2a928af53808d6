"""A model, its plan and a setting, resolved: what explaining, comparing, linting and fitting have in common.

The model is on the meta device, and the plan is resolved by arithmetic. One microbatch is recorded for each tp and cp
size and set of modes. Meshes that differ only in other axes share the recording.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import torch
from torch import nn

from parallelize.axes.pipeline.schedules import Schedule
from parallelize.axes.tensor.overlap_sites import planned_call_sites
from parallelize.axes.tensor.torch_styles.dicts import is_styles
from parallelize.axes.tensor.torch_styles.lowering import passes_dtensors, plan_of_styles, read_by_code
from parallelize.axes.tensor.watch.first_forward import unwatched
from parallelize.base.errors import ModelError, PlanError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.plan.choose import plan_or_none
from parallelize.plan.model_facts import ModelFacts, describe
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.options import NAMES as OPTION_NAMES
from parallelize.plan.options import ROW_OPTIONS, Options
from parallelize.plan.parameter_shards import ParameterShard, shards_of
from parallelize.plan.resolve import resolve
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.schema import Plan
from parallelize.plan.stages import Costs, Stages
from parallelize.state.randomness.init.initialize import build_on_meta
from parallelize.tools.analysis.cost.data_axes import OwnerSteps, depends_on, matrix_parameters, owner_steps
from parallelize.tools.analysis.cost.setting import Setting, check_setting
from parallelize.tools.analysis.cost.training_step import RankStep
from parallelize.tools.analysis.outline.outlined import OutlinedSubject
from parallelize.tools.analysis.record.layer_dedup import LayerClasses, consistent, layer_classes
from parallelize.tools.analysis.record.recording import RECORDED_OPTIONS, RecordedBatch, record
from parallelize.tools.analysis.record.shapes import fake_mesh
from parallelize.tools.analysis.record.trace_data import MicrobatchTrace


@dataclass
class Subject:
    """A model and a plan. Recordings and resolved plans are cached for the next setting.

    Attributes:
        plan: as `parallelize_module` takes it.
        costs: of pipeline units, as `parallelize_model` takes them.
        irregular: layers of one class were seen to differ, so every layer is run from now on.
        outline: the model's outline, once it was asked for; `measure.py` makes it.
    """

    source: ModelSource
    plan: Any = None
    irregular: bool = False
    costs: Costs | None = None
    outline: tuple[OutlinedSubject | None] | None = None
    _facts: dict[str, ModelFacts] = field(default_factory=dict)
    _plans: dict[tuple[bool, int], Plan | None] = field(default_factory=dict)
    _recorded: nn.Module | None = None
    _traces: dict[tuple, MicrobatchTrace] = field(default_factory=dict)
    _resolved: dict[tuple, ResolvedPlan] = field(default_factory=dict)
    _shards: dict[tuple, list[ParameterShard]] = field(default_factory=dict)
    _owned: dict[Hashable, OwnerSteps] = field(default_factory=dict)

    def model(self, weights_dtype: str) -> ModelFacts:
        """Names and shapes."""
        if weights_dtype not in self._facts:
            self._facts[weights_dtype] = describe(self.source.build("meta", dtype=getattr(torch, weights_dtype)))
        return self._facts[weights_dtype]

    def plan_for(self, setting: Setting) -> Plan | None:
        """The plan; None where there is none and the mesh does not need one (no `tp`, no `cp`). Raises: PlanError."""
        needed, tp = "tp" in setting.mesh.names or setting.size("cp") > 1, 2
        if self.plan == "auto":
            tp = setting.mesh.ranks("tp")
        key = needed, tp
        if key not in self._plans:
            root = self._planned_root(setting)
            styled = needed or is_styles(self.plan)
            plan = plan_of_styles(root, self.plan, tp=tp) if styled else plan_or_none(root, self.plan, tp)
            self._plans[key] = plan or plan_or_none(root, None)
            if plan is not None and (plan.unlowered_styles or read_by_code(plan)):
                what = f"a dict of styles is explained where all of them have rules: {passes_dtensors(plan)}"
                raise PlanError(Problem("untranslatable-plan", what, fix="styles with local tensors, or a plan"))
        return self._plans[key]

    def _planned_root(self, setting: Setting) -> nn.Module:
        """The model for which a plan is chosen. One's own, of which one is derived, with what its constructor does."""
        if self.plan != "auto" or self.source.config is not None:
            return self.model(setting.weights_dtype).root
        if self._recorded is None:
            self._recorded = build_on_meta(self.source.make, None)
        return self._recorded

    def complete(self, setting: Setting) -> Setting:
        """The setting with the plan's defaults, and the package's, for options that it leaves open. Raises:
        PlanError."""
        plan = plan_or_none(self._planned_root(setting), self.plan, setting.mesh.ranks("tp"))
        return setting.complete(plan.options if plan is not None else None)

    def resolved(self, setting: Setting) -> ResolvedPlan:
        """The plan as `parallelize_model` would apply it. Raises: PlanError and ModelError, with every problem."""
        options = Options(**{name: getattr(setting, name) for name in OPTION_NAMES})
        key = (setting.weights_dtype, setting.mesh, options)
        if key not in self._resolved:
            model, plan = self.model(setting.weights_dtype), self.plan_for(setting)
            over_tp = self._over_tp(setting) if "tp" in setting.mesh.names else None
            others = setting.mesh.only(*(axis for axis in setting.mesh.names if axis != "tp"))
            costs = self.costs if setting.size("pp") > 1 else None
            self._resolved[key] = resolve(plan, model, others, options, costs=costs, earlier=over_tp)
        return self._resolved[key]

    def _over_tp(self, setting: Setting) -> ResolvedPlan:
        """The plan over `tp` alone, which takes the longest to resolve, and which most settings share."""
        modes = Options(**{name: getattr(setting, name) for name in ROW_OPTIONS})
        key = (setting.weights_dtype, setting.size("tp"), modes)
        if key not in self._resolved:
            model, mesh = self.model(setting.weights_dtype), setting.mesh.only("tp")
            self._resolved[key] = resolve(self.plan_for(setting), model, mesh, modes)
        return self._resolved[key]

    def layers(self, setting: Setting) -> list[str]:
        """Names of the layers, without units before and after them."""
        stages = self.resolved(setting).stages
        if stages is None:
            return []
        prefix = stages.cuts.layers + "." if stages.cuts.layers else ""
        units = stages.units[stages.num_first :]
        return [unit for unit in units if unit.startswith(prefix) and unit[len(prefix) :].isdigit()]

    def trace(
        self, setting: Setting, every_layer: bool = False, split_backward: bool = False, to_one_rank: bool = False
    ) -> MicrobatchTrace:
        """One microbatch of the model under the setting's tp and cp sizes and modes. to_one_rank: see `record`.

        Raises: ParallelizeError of the plan; ModelError `cannot-record` where the model's forward cannot run on meta
            tensors.
        """
        recorded = Options(**{name: getattr(setting, name) for name in RECORDED_OPTIONS})
        key = (
            setting.size("tp"),
            "tp" in setting.mesh.names,
            setting.size("cp"),
            recorded,
            setting.microbatch_size,
            setting.sequence,
            setting.weights_dtype,
            every_layer,
            split_backward,
            to_one_rank,
        )
        if key not in self._traces:
            self._traces[key] = self._record(setting, recorded, every_layer, (split_backward, to_one_rank))
        return self._traces[key]

    def _record(
        self, setting: Setting, options: Options, every_layer: bool, ways: tuple[bool, bool]
    ) -> MicrobatchTrace:
        """ways: `split_backward` and `to_one_rank`."""
        layers = self.layers(setting)
        recompute_every = setting.recompute_every if setting.recompute != "off" else 1
        classes = layer_classes(layers, self.model(setting.weights_dtype), recompute_every)
        if every_layer or self.irregular:
            classes = LayerClasses.all_run(layers)
        trace = self._run(setting, options, classes, ways)
        if not consistent(trace, classes):  # layers of one class that did not do the same: run all of them
            self.irregular = True
            trace = self._run(setting, options, LayerClasses.all_run(layers), ways)
        return trace

    def _run(
        self, setting: Setting, options: Options, classes: LayerClasses, ways: tuple[bool, bool]
    ) -> MicrobatchTrace:
        source, sequence = self.source, setting.sequence
        model = source.build("meta", dtype=getattr(torch, setting.weights_dtype))
        axes = [(axis, size) for axis, size in setting.mesh.axes if axis == "tp" or (axis == "cp" and size > 1)]
        if setting.folds and (dp := setting.expert_ranks // gcd(setting.expert_ranks, setting.size("cp", "tp"))) > 1:
            axes = [("dp", dp), *axes]  # as many as experts are divided over
        batch = RecordedBatch(
            lambda module, size: source.inputs(module, size, sequence),
            setting.microbatch_size,
            source.loss,
            source.count,
        )
        watching = unwatched() if self._traces else nullcontext()  # one watched forward shows what all would
        with fake_mesh(MeshSpec(axes or [("dp", 1)])) as mesh, watching:
            return record(
                model,
                mesh,
                resolved=self.resolved(setting),
                stages=self._one_stage(setting),
                classes=classes,
                options=options,
                batch=batch,
                split_backward=ways[0],
                to_one_rank=ways[1],
            )

    def _one_stage(self, setting: Setting) -> Stages | None:
        """All units of the model as one stage."""
        stages = self.resolved(setting).stages
        return replace(stages, starts=(0,)) if stages is not None and stages.num_stages > 1 else stages

    def rank_step(
        self, setting: Setting, schedule: Schedule, pp_rank: int, every_layer: bool = False, to_one_rank: bool = False
    ) -> RankStep:
        """The step of one pp rank. to_one_rank: of the one that gets all tokens of its group of `ep`, in every
        layer."""
        splits = self._splits_backward(setting, schedule)
        return RankStep(
            self.trace(setting, every_layer, to_one_rank=to_one_rank),
            self.resolved(setting).stages,
            setting,
            schedule,
            pp_rank,
            shards=self.shards(setting, pp_rank),
            split_trace=self.trace(setting, every_layer, True, to_one_rank) if splits else None,
            owned=self.owner_steps(setting, pp_rank),
        )

    def _splits_backward(self, setting: Setting, schedule: Schedule) -> bool:
        """Whether dgrad and wgrad run apart, as `Pipeline` decides."""
        scheduled = any(action.kind == "W" for order in schedule.orders for action in order)
        if not scheduled or setting.recompute != "off" or setting.zero == 3:
            return False
        call_sites = planned_call_sites(self.resolved(setting), self.model(setting.weights_dtype))
        return setting.size("tp") == 1 or next(call_sites, None) is None

    def shards(self, setting: Setting, pp_rank: int) -> list[ParameterShard]:
        """The parameters that one pp rank stores."""
        resolved = self.resolved(setting)
        key = (id(resolved), pp_rank)  # resolved plans are kept, so that ids stay theirs
        if key not in self._shards:
            self._shards[key] = shards_of(resolved, pp_rank)
        return self._shards[key]

    def matrix_parameters(self, setting: Setting, pp_rank: int) -> frozenset[str]:
        """What Muon steps as matrices on one pp rank."""
        root = self.model(setting.weights_dtype).root
        return matrix_parameters(root, self.resolved(setting), setting, self.shards(setting, pp_rank))

    def owner_steps(self, setting: Setting, pp_rank: int) -> OwnerSteps:
        """What an optimizer of full matrices or parameters sends on one pp rank."""
        resolved, shards = self.resolved(setting), self.shards(setting, pp_rank)
        key = depends_on(resolved, setting, shards)  # which settings of other schedules, microbatches, recompute share
        if key not in self._owned:
            root = self.model(setting.weights_dtype).root
            self._owned[key] = owner_steps(root, resolved, setting, shards)
        return self._owned[key]


def check(subject: Subject, setting: Setting) -> None:
    """All checks that need no recording. Raises: ParallelizeError."""
    check_setting(setting)
    subject.resolved(setting)
    scalars = [fact.fqn for fact in subject.model(setting.weights_dtype).parameters.values() if not fact.shape]
    if setting.zero == 3 and scalars:
        what = f"{scalars[0]} is a scalar, which `fully_shard` cannot split"
        raise ModelError(Problem("scalar-parameter", what, fix="make it a tensor of one element, or use zero=2"))
