"""Resolves a plan on the names and shapes of a model, a mesh and options: the one place where they become decisions.

`parallelize_model` and its steps, `explain`, `fit`, `lint`, `verify`, `describe_plan` and checkpoints read the result, so
that `explain` shows what runs. Nothing is changed, and no process group is needed.

Torch-free.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from parallelize.base.errors import PlanError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.plan.adapters import for_adapters, peft_prefix, refuse_over_axes, renamed
from parallelize.plan.attention_kinds import attention_kinds
from parallelize.plan.learned_prompts import PROMPTS
from parallelize.plan.mixed_rows import check_batch_parts
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.options import Options
from parallelize.plan.parameter_layouts import dotted
from parallelize.plan.resolved import ResolvedPlan
from parallelize.plan.schema import Plan, Rule
from parallelize.plan.stage_ranks import ranks_of_stages
from parallelize.plan.stages import Assignment, Costs, Stages, cut_stages
from parallelize.plan.tensor_rows import TensorRows, tensor_rows
from parallelize.plan.tied_parameters import tied_parameters
from parallelize.plan.units import recompute_units, zero_units

NO_PLAN = Plan("none", (), unclaimed="replicate")
"""The plan of a model without one: every parameter is replicated over `tp`."""


def resolve(
    plan: Plan | None,
    model: ModelFacts,
    mesh: MeshSpec,
    options: Options | None = None,
    *,
    costs: Costs | None = None,
    assignment: Assignment | None = None,
    stage_ranks: tuple[int, ...] | None = None,
    earlier: ResolvedPlan | None = None,
) -> ResolvedPlan:
    """Decide everything about a model on a mesh.

    Args:
        plan: None for a model without one.
        model: names, shapes and ties of the full model, on any device.
        mesh: its axes say what is decided.
        options: of the run; None, or what they leave open: the plan's `defaults:`.
        costs, assignment: of pipeline stages: see `cut_stages`.
        stage_ranks: the pp rank of each stage. Default: by the schedule; one stage where `pp` has one rank.
        earlier: what steps of application before this one have resolved; it stays for the axes that `mesh` lacks.

    Raises:
        PlanError: all problems of the rules at once, in the order of the file; those of `cut_stages`; `no-attention`,
            `unmatched-attention`, `unknown-parameter`, `tie-shapes-differ`, `tie-layouts-differ`, `unplanned-adapter`.
        ModelError: `unmatched-unit`, `no-recompute-units`, `mixes-rows`.
    """
    refuse_over_axes(model, mesh)
    plan = for_model(plan or NO_PLAN, model).with_options(options)
    check_batch_parts(model.objects, mesh, plan.options.microbatches(mesh))
    rows = _tensor_rows(plan, model, mesh, earlier)
    stages, ranks = _stages(plan, model, mesh, costs, assignment, stage_ranks, earlier)
    resolved = ResolvedPlan(
        plan,
        rows.facts if isinstance(rows, ResolvedPlan) else model,  # of the same parameters
        earlier.mesh.with_axes(mesh) if earlier is not None else mesh,
        rows.modules,
        rows.parameters,
        rows.regions,
        rows.attributes,
        stages,
        ranks,
        attention=attention_kinds(plan, model) if mesh.ranks("cp") > 1 else earlier.attention if earlier else {},
        recompute_units=recompute_units(plan, model) if plan.options.recompute != "off" else (),
    )
    return replace(
        resolved,
        ties=tied_parameters(plan, model, rows.parameters, resolved.pp_ranks),
        zero_units=zero_units(plan, model, layers=resolved.cut_layers) if plan.options.zero == 3 else (),
    )


def resolve_again(earlier: ResolvedPlan, model: ModelFacts) -> ResolvedPlan:
    """The same decisions for a model that has got adapters since: its stages stay.

    Args:
        earlier: of the model before.
        model: the full model under its names of now.

    Raises: PlanError `unplanned-adapter`.
    """
    refuse_over_axes(model, earlier.mesh)
    plan = for_adapters(earlier.plan, model)
    rows = _tensor_rows(plan, model, earlier.mesh, None)
    resolved = replace(
        earlier,
        plan=plan,
        facts=model,
        modules=rows.modules,
        parameters=rows.parameters,
        regions=rows.regions,
        attributes=rows.attributes,
    )
    return replace(resolved, ties=tied_parameters(plan, model, rows.parameters, resolved.pp_ranks))


def _tensor_rows(
    plan: Plan, model: ModelFacts, mesh: MeshSpec, earlier: ResolvedPlan | None
) -> TensorRows | ResolvedPlan:
    """What holds over `tp`. On a mesh without it the rules matter only for the head whose matmul is left to the loss."""
    if "tp" in mesh.names:
        return tensor_rows(plan, model, mesh.size("tp"))
    if earlier is not None and "tp" in earlier.mesh.names:
        return earlier
    full = plan.options.over(Options())
    options = replace(full, sequence_parallel=False, loss_parallel=False, fuse_loss=False)
    rows = tensor_rows(replace(NO_PLAN, options=options), model, 1)
    if not plan.options.fuse_loss:
        return rows
    if plan.name == NO_PLAN.name and not plan.rules:
        what = "fuse_loss needs a plan that names the head, and this model has none"
        raise PlanError(Problem("no-vocabulary-output", what, fix="a plan with `lm_head: colwise(output=vocabulary)`"))
    fused = tensor_rows(replace(plan, options=replace(options, fuse_loss=True)), model, 1)
    return replace(rows, modules={fqn: row for fqn, row in fused.modules.items() if row.contract.defers_logits})


def _stages(
    plan: Plan,
    model: ModelFacts,
    mesh: MeshSpec,
    costs: Costs | None,
    assignment: Assignment | None,
    ranks: tuple[int, ...] | None,
    earlier: ResolvedPlan | None,
) -> tuple[Stages | None, tuple[int, ...]]:
    """The stages and the pp rank of each. A model that cannot be cut has no stages, where it need not be."""
    if "pp" not in mesh.names and earlier is not None:
        return earlier.stages, earlier.stage_ranks
    size, options, is_asked_for = mesh.ranks("pp"), plan.options, ranks is not None
    if ranks is None:
        ranks = ranks_of_stages(options.schedule, size, options.stages_per_rank) if size > 1 else (0,)
    try:
        return cut_stages(plan, model, len(ranks), costs=costs, assignment=assignment), ranks
    except PlanError:
        if is_asked_for or len(ranks) > 1 or assignment is not None or costs is not None:
            raise
        return None, ranks


def for_model(plan: Plan, model: ModelFacts) -> Plan:
    """The plan for this very model: without its head, wrapped by PEFT, with adapters.

    Raises: PlanError `unplanned-adapter`.
    """
    prefix = peft_prefix(model)
    plan = plan.for_config(partial(dotted, model.config))
    plan = _for_base_model(plan, model, prefix)
    if prefix and plan.unclaimed != "leave":
        outside = (prefix, f"{PROMPTS}.")
        plan = renamed(plan, lambda name: name if name.startswith(outside) else prefix + name)
    return for_adapters(plan, model)


def _for_base_model(plan: Plan, model: ModelFacts, prefix: str = "") -> Plan:
    """The plan for a model without its head: rules of the base model lose their prefix, all others but the default are dropped."""
    if not plan.base or prefix + plan.base in model.aliases:
        return plan
    base = plan.base + "."

    def is_inside(*names: str) -> bool:
        return all(name.startswith(base) for name in names)

    ties = (replace(tie, members=tuple(filter(is_inside, tie.members))) for tie in plan.ties)
    cuts = plan.cuts and replace(
        plan.cuts,
        first=tuple(filter(is_inside, plan.cuts.first)),
        last=tuple(filter(is_inside, plan.cuts.last)),
        every=tuple(filter(is_inside, plan.cuts.every)),
    )
    inside = replace(
        plan,
        cuts=cuts,
        ties=tuple(tie for tie in ties if len(tie.members) > 1),
        zero_units=tuple(filter(is_inside, plan.zero_units)),
        recompute_units=tuple(filter(is_inside, plan.recompute_units)),
        attention=tuple(item for item in plan.attention if is_inside(item.pattern)),
        rules=tuple(map(_of_base, (rule for rule in plan.rules if is_inside(rule.pattern) or rule.pattern == _ALL))),
        local=tuple(item for item in plan.local if is_inside(item.pattern)),
        local_inputs=tuple(item for item in plan.local_inputs if is_inside(item.pattern)),
    )
    return renamed(inside, lambda name: name.removeprefix(base))


_ALL = "**"


def _of_base(rule: Rule) -> Rule:
    """The default of the whole model may have nothing to claim in its base model."""
    return replace(rule, optional=rule.optional or rule.pattern == _ALL)
