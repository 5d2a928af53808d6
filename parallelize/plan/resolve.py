"""Resolves a plan on the names and shapes of a model, a mesh and options: the one place where they become decisions.

`parallelize_model` and its steps, `explain`, `fit`, `lint`, `verify`, `describe_plan` and checkpoints read the result,
so that `explain` shows what runs. Nothing is changed, and no process group is needed.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from parallelize.base.errors import ModelError, PlanError, Problem, did_you_mean
from parallelize.base.mesh import MeshSpec
from parallelize.plan.adapters import (
    PROMPTS,
    for_adapters,
    peft_prefix,
    refuse_over_axes,
    renamed,
    without_trained_rows,
)
from parallelize.plan.attribute_paths import dotted
from parallelize.plan.local_rows import Attributes, check_batch_parts
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.options import Options
from parallelize.plan.pattern import alternatives, check_pattern, generic, matches
from parallelize.plan.resolved import ParameterRow, ResolvedPlan
from parallelize.plan.schema import LONGEST_LIST, AttentionRule, Plan, Rule, Tie
from parallelize.plan.stage_ranks import ranks_of_stages
from parallelize.plan.stages import Assignment, Costs, Stages, cut_stages, longest_list
from parallelize.plan.tensor_rows import TensorRows, tensor_rows
from parallelize.plan.text_part import sequence_module, text_part

NO_PLAN = Plan("none", (), on_unclaimed="replicate")
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
        sequences=sequence_module(plan, model) if mesh.ranks("cp") > 1 else earlier.sequences if earlier else "",
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
    rows = _tensor_rows(plan, model, earlier.mesh, None, earlier.attributes)  # by now the modules have local values
    resolved = replace(
        earlier,
        plan=plan,
        facts=model,
        modules=rows.modules,
        parameters=rows.parameters,
        regions=rows.regions,
    )
    return replace(resolved, ties=tied_parameters(plan, model, rows.parameters, resolved.pp_ranks))


def _tensor_rows(
    plan: Plan, model: ModelFacts, mesh: MeshSpec, earlier: ResolvedPlan | None, attributes: Attributes | None = None
) -> TensorRows | ResolvedPlan:
    """What holds over `tp`. On a mesh without it the rules matter only for the head whose matmul is left to the
    loss."""
    if "tp" in mesh.names:
        return tensor_rows(plan, model, mesh.size("tp"), attributes)
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
    fused = tensor_rows(replace(without_trained_rows(plan, model), options=replace(options, fuse_loss=True)), model, 1)
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
    """The plan for this very model: without its head, wrapped, with adapters.

    Raises: PlanError `unplanned-adapter`.
    """
    prefix = peft_prefix(model)
    plan = plan.for_config(partial(dotted, model.config))
    plan = _for_base_model(plan, model, prefix)
    if prefix and plan.on_unclaimed != "leave":
        outside = (prefix, f"{PROMPTS}.")
        plan = renamed(plan, lambda name: name if name.startswith(outside) else prefix + name)
    return for_adapters(plan, model)


def _for_base_model(plan: Plan, model: ModelFacts, prefix: str = "") -> Plan:
    """The plan for a model without its head: rules of the base model lose their prefix, all others but the default are
    dropped."""
    if not plan.base or prefix + plan.base in model.module_fqns:
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
        sequences=plan.sequences if is_inside(plan.sequences) else "",
        rules=tuple(
            map(_rule_for_base, (rule for rule in plan.rules if is_inside(rule.pattern) or rule.pattern == _ALL))
        ),
        local=tuple(item for item in plan.local if is_inside(item.pattern)),
        local_inputs=tuple(item for item in plan.local_inputs if is_inside(item.pattern)),
    )
    return renamed(inside, lambda name: name.removeprefix(base))


_ALL = "**"


def _rule_for_base(rule: Rule) -> Rule:
    """The default of the whole model may have nothing to claim in its base model."""
    return replace(rule, optional=rule.optional or rule.pattern == _ALL)


# -- attention kinds -------------------------------------------------------------------------------------------------
# Which modules mix the tokens of a sequence, and how they do it over `cp`, by the plan's `attention:`. Torch-free.


_ATTENTION = ("attn", "attention")
_TOWERS = {"vision_config": ("vision", "visual"), "audio_config": ("audio", "speech")}


def attention_kinds(plan: Plan, model: ModelFacts) -> dict[str, str]:
    """Module fqn -> kind of its attention. Raises: PlanError `no-attention`, `unmatched-attention`,
    `two-attentions`."""
    if not plan.attention:
        raise PlanError(_no_attention(plan, model))
    kinds: dict[str, str] = {}
    for rule in plan.attention:
        names = list(_named(rule, plan, model))
        twice = [name for name in names if kinds.get(name, rule.kind) != rule.kind]
        if twice:
            what = f"{twice[0]} is {kinds[twice[0]]} by one line of `attention:` and {rule.kind} by another"
            raise PlanError(
                Problem("two-attentions", what, plan.source, fix="patterns that do not match the same module")
            )
        kinds |= dict.fromkeys(names, rule.kind)
    if not kinds:
        what = f"no line under `attention:` of the plan {plan.name} names a module of {type(model.root).__name__}"
        raise PlanError(Problem("unmatched-attention", what, plan.source, fix="see model.named_modules()"))
    return kinds


def _no_attention(plan: Plan, model: ModelFacts) -> Problem:
    """Why a plan names no attention, as far as it is known: of models that cannot run over `cp` no line would help."""
    why, kind = _not_served(model), type(model.root).__name__
    if why:
        what = f"{kind} over cp is not served: {why}"
        return Problem(
            "no-attention", what, plan.source, fix="a mesh without cp: tp with sequence_parallel shards sequences too"
        )
    within = sequence_module(plan, model)
    names = [name for name in model.modules if not within or name.startswith(f"{within}.")]
    names = sorted({generic(name) for name in names if name.rpartition(".")[2].lower().endswith(_ATTENTION)})
    what = f"the plan {plan.name} does not name the attention modules of {kind}"
    shown = names[0] if names else "layers.*.attn"
    fix = f"attention: {{{shown}: causal}}, or bidirectional, in a plan of your own"
    return Problem("no-attention", what, plan.source, fix=fix)


def _not_served(model: ModelFacts) -> str:
    """Why attention over `cp` cannot serve a model; empty if it may."""
    config = getattr(model.root, "config", None)
    for field, inputs in (("vision_config", "images"), ("audio_config", "audios")):
        if getattr(config, field, None) is not None and not _embeds(config):
            towers = [name for name in model.modules if name.rpartition(".")[2].startswith(_TOWERS[field])]
            tower = min(towers, key=len, default=f"the tower of the {inputs}")
            return f"{tower} reads {inputs}, no sequences [batch, tokens]"
    if getattr(config, "is_encoder_decoder", False):
        return "its decoder attends to the tokens of the encoder, another sequence (cross-attention)"
    if getattr(model.root, "main_input_name", "input_ids") == "pixel_values":
        return "its inputs are images, no sequences [batch, tokens]"
    return ""


def _embeds(config: object) -> bool:
    """Whether a model puts what its towers return in the places of some tokens of a text."""
    names = (f"{medium}_token_{end}" for medium in ("image", "audio", "video") for end in ("id", "index"))
    return any(hasattr(config, name) for name in names)


def _named(rule: AttentionRule, plan: Plan, model: ModelFacts) -> Iterator[str]:
    """The modules that a rule names. Raises: PlanError `unmatched-attention`."""
    for alternative in alternatives(rule.pattern):
        names = [name for name in model.modules if matches(alternative, name)]
        if not names and not rule.optional:
            what = f"`attention: {alternative}` names no module of {type(model.root).__name__}"
            raise PlanError(Problem("unmatched-attention", what, plan.source, fix="see model.named_modules()"))
        yield from (name for name in names if not rule.child or f"{name}.{rule.child}" in model.modules)


# -- tied parameters -------------------------------------------------------------------------------------------------
# Which parameters are tied over pipeline stages: those that were one object, and those that a plan declares.
# Torch-free.


def tied_parameters(
    plan: Plan,
    model: ModelFacts,
    parameters: Mapping[str, ParameterRow],
    pp_ranks: Callable[[tuple[str, ...]], tuple[int, ...]],
) -> tuple[Tie, ...]:
    """The ties that the plan declares, and every other parameter that several pp ranks store.

    Args:
        parameters: the rows over `tp`.
        pp_ranks: names of parameters -> the pp ranks that store any of them.

    Raises: PlanError `unknown-parameter`, `tie-shapes-differ`, `tie-layouts-differ`.
    """
    if problems := [*_wrong_members(plan, model), *_wrong_layouts(plan, parameters)]:
        raise PlanError(*problems)
    declared = {name for tie in plan.ties for name in tie.members}
    shared = (
        Tie(fact.fqn, fact.names)
        for fact in model.parameters.values()
        if len(fact.names) > 1 and len(pp_ranks(fact.names)) > 1 and not declared & set(fact.names)
    )
    return (*plan.ties, *shared)


def _wrong_members(plan: Plan, model: ModelFacts) -> list[Problem]:
    problems = []
    for tie in plan.ties:
        unknown = [name for name in tie.members if name not in model.parameter_fqns]
        for name in unknown:
            what = f"tie {tie.name} names {name!r}, which is not a parameter"
            problems.append(Problem("unknown-parameter", what, fix=did_you_mean(name, model.parameter_fqns)))
        known = [name for name in tie.members if name not in unknown]
        shapes = {model.parameters[model.parameter_fqns[name]].shape for name in known}
        if len(shapes) > 1:
            what = f"tie {tie.name} joins parameters of shapes {sorted(map(list, shapes))}"
            problems.append(Problem("tie-shapes-differ", what, fix="tie parameters of one shape"))
    return problems


def _wrong_layouts(plan: Plan, parameters: Mapping[str, ParameterRow]) -> list[Problem]:
    """Gradients of copies can be summed only where the copies have the same layout over tp."""
    problems = []
    rows_of = {name: row for row in parameters.values() for name in row.fact.names}
    for tie in plan.ties:
        members = {name: rows_of[name] for name in tie.members if name in rows_of}
        if len({(row.layout.dim, row.layout.owned) for row in members.values()}) > 1:
            what = f"members of {tie.name} are sharded differently over tp"
            rows = tuple((name, f"{row.rule.style}: dim {row.layout.dim}") for name, row in members.items())
            fix = "give them styles that shard the same dim: `embedding` and `colwise(output=vocabulary)`"
            problems.append(Problem("tie-layouts-differ", what, rows=rows, fix=fix))
    return problems


# -- units -----------------------------------------------------------------------------------------------------------
# Units of a model: which modules ZeRO 3 gathers together, and which ones recompute their activations. Torch-free.


def layers_of(plan: Plan, model: ModelFacts | None = None) -> str:
    """The fqn of the module that contains the layers; empty where neither the plan names it, nor the model has a text
    part, whose layers they are."""
    source = plan.cuts or plan.layers_region
    if source is not None and source.layers != LONGEST_LIST:
        return source.layers
    return longest_list(model) if model is not None and text_part(model) else ""


def zero_units(
    plan: Plan, model: ModelFacts, *, patterns: Sequence[str] | None = None, layers: str = ""
) -> tuple[str, ...]:
    """The units of ZeRO 3: those that match `patterns`, else the plan's `zero: {units: ...}`, else the layers.

    Args:
        plan: for this model (`for_model`).
        patterns: the caller's choice; None: the plan's.
        layers: fqn of the layers where pipeline stages were cut; default: as the plan names it.

    Returns: fqns, in the model's order.
    Raises: ModelError `unmatched-unit` for a pattern, or one of its alternatives, that names no module.
    """
    names = [name for name in model.modules if name]
    if patterns is None:
        patterns = plan.zero_units
    if not patterns:
        layers = layers or layers_of(plan, model)
        return tuple(name for name in names if layers and name.rpartition(".")[0] == layers)
    for alternative in (alternative for pattern in patterns for alternative in alternatives(pattern)):
        if not any(matches(alternative, name) for name in names):
            what = f"no module matches the ZeRO unit {alternative!r}"
            raise ModelError(Problem("unmatched-unit", what, fix=did_you_mean(alternative, names)))
    return tuple(name for name in names if any(matches(pattern, name) for pattern in patterns))


def recompute_units(plan: Plan, model: ModelFacts, patterns: Sequence[str] | None = None) -> tuple[str, ...]:
    """The modules that run again in backward: those that match `patterns`, else the plan's `recompute:`, else the
    layers.

    Args:
        plan: for this model (`for_model`).
        patterns: the caller's choice; None: the plan's.

    Returns: fqns, in the model's order.
    Raises: PlanError of patterns; ModelError `no-recompute-units` where there are none, `nested-units`.
    """
    names = [name for name in model.modules if name]
    if patterns is None:
        patterns = _planned(plan, model)
    chosen: set[str] = set()
    for pattern in patterns:
        check_pattern(pattern, "recompute units")
        for alternative in alternatives(pattern):
            matched = {name for name in names if matches(alternative, name)}
            if not matched:
                what = f"no module is called {alternative!r}"
                raise ModelError(Problem("no-recompute-units", what, fix=did_you_mean(alternative, names)))
            chosen |= matched
    units = tuple(name for name in names if name in chosen)
    for name in units:
        parent = next((other for other in units if name.startswith(other + ".")), None)
        if parent is not None:
            what = f"{name} is inside {parent}, and both are to be recomputed"
            raise ModelError(Problem("nested-units", what, fix="name one of them"))
    return units


def _planned(plan: Plan, model: ModelFacts) -> Sequence[str]:
    layers = layers_of(plan, model)
    if plan.recompute_units or layers:
        return plan.recompute_units or [f"{layers}.*"]
    what = f"plan {plan.name}, which names neither units nor layers" if plan.rules else "no plan"
    fix = 'recompute(model, units="model.layers.*"), or `recompute: {units: [...]}` in the plan'
    raise ModelError(Problem("no-recompute-units", f"{type(model.root).__name__} has {what}", fix=fix))
