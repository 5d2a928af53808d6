"""`lint`: what can be known about a plan, a model and a mesh without running them on values.

Three layers of checks: the file alone; the file against the model's names and shapes and the mesh; and the planned
forward on tensors without values against the unsharded forward. The last one shows layouts that do not match and
modules that see only a part of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from parallelize.axes.tensor.planned_forward import FIX_SHAPES
from parallelize.base.errors import ParallelizeError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.dims.meta_calls import without_values
from parallelize.plan.model_facts import ModelFacts
from parallelize.plan.models.miniature.rates import disable_dropout
from parallelize.plan.models.model_source import source_of
from parallelize.plan.pattern import alternatives, generic, matches
from parallelize.plan.resolved import ModuleRow, ResolvedPlan
from parallelize.plan.schema import Plan
from parallelize.plan.styles.contract import Conversion
from parallelize.tools.analysis.cost.setting import Setting, check_setting, make_setting
from parallelize.tools.analysis.findings import dims_findings, gathered_over_cp, padded_experts
from parallelize.tools.analysis.record.layer_dedup import drop_represented, layer_classes
from parallelize.tools.analysis.record.shapes import CallShapes, ForwardShapes, Shape, fake_mesh, forward_shapes
from parallelize.tools.analysis.subject import Subject
from parallelize.training.apply_plan import parallelize_module

_OF_OPERATIONS = ("mixed-sequence", "mixed-features", "divided-features")  # which name the line that is wrong
BATCH, SEQUENCE = 2, 24  # of the forward on meta; the sequence is rounded up to a multiple of tp


@dataclass(frozen=True)
class Finding:
    """A mistake that `lint` found.

    Attributes:
        severity: "error": the plan would be refused, fail, or compute other numbers; "warning": correct but expensive,
            or possibly unintended.
        problem: its slug, place in the plan's file, text and fix.
    """

    severity: str
    problem: Problem


def lint(
    model: Any, plan: Any = None, mesh: str | MeshSpec = "tp=2", *, world_size: int | None = None, **options: Any
) -> list[Finding]:
    """Check a plan for a model and a mesh. Nothing runs on values, and no device is needed.

    Args:
        model: a config.json or its folder, a model type of `transformers`, a published size such as "llama-3-8b", a
            string "package.module:function", a `ModelSource`, or a function that builds the module.
        plan: as `parallelize_module` takes it; None: the plan of the model's family.
        mesh: sizes of the axes, such as "pp=2,dp=4,tp=8", or a `MeshSpec`.
        world_size: the number of processes of the job, which the mesh must match; None: not checked.
        options: fields of `Setting`. Without `sequence_parallel` and `loss_parallel`, every mode that the plan serves
            is checked.

    Returns:
        Findings, errors first; empty for a plan without mistakes.

    Raises:
        MeshError: `bad-mesh`. ModelError: `unknown-option`, `bad-option`, or that the model cannot be read. All other
            mistakes are findings.

    Cost:
        No communication: one process, tensors without values.
    """
    return findings(Subject(source_of(model), plan), make_setting(mesh, options), world_size)


def findings(subject: Subject, setting: Setting, world_size: int | None = None) -> list[Finding]:
    """Findings of every mode, each once, errors first."""
    unique: dict[tuple, Finding] = {}
    try:
        plan = subject.plan_for(setting)
    except ParallelizeError as error:
        return [Finding("error", problem) for problem in error.problems]
    for mode in modes_of(subject, plan, setting):
        for finding in lint_setting(subject, subject.complete(mode), world_size):
            problem = finding.problem
            unique.setdefault((problem.slug, problem.where, problem.what), finding)
    return sorted(unique.values(), key=lambda finding: finding.severity != "error")


def modes_of(subject: Subject, plan: Plan | None, setting: Setting) -> list[Setting]:
    """The settings to check: the given one; if it chooses no mode, one for every mode that the plan serves."""
    if plan is None or setting.sequence_parallel is not None or setting.loss_parallel is not None:
        return [setting]
    modes = [setting]
    if setting.size("tp") > 1:
        for name in modes_served(subject, plan, setting):
            modes.append(replace(modes[-1], **{name: True}))
    return modes


def modes_served(subject: Subject, plan: Plan, setting: Setting) -> list[str]:
    """Of "sequence_parallel" and "loss_parallel", what the plan serves over `tp`."""
    names = {*subject.model(setting.weights_dtype).module_fqns}
    heads = [rule for rule in plan.rules if rule.style.keeps_vocabulary]
    patterns = [pattern for rule in heads for pattern in alternatives(rule.pattern)]
    has_head = any(matches(pattern, name) for pattern in patterns for name in names)
    return [*(["sequence_parallel"] if plan.regions else []), *(["loss_parallel"] if has_head else [])]


def lint_setting(subject: Subject, setting: Setting, world_size: int | None = None) -> list[Finding]:
    """Findings of one plan on one mesh, in one mode."""
    results = _errors_raised_by(lambda: check_setting(setting))
    if world_size is not None and world_size != setting.mesh.world_size:
        what = f"{setting.mesh} makes {setting.mesh.world_size} ranks, and there are {world_size}"
        fix = f"change a size, or start {setting.mesh.world_size} processes"
        results.append(Finding("error", Problem("wrong-world-size", what, fix=fix)))
    results += _errors_raised_by(lambda: subject.resolved(setting))
    resolved = None if results else subject.resolved(setting)
    if resolved is not None:
        results += [Finding("warning", problem) for problem in padded_experts(resolved, setting.compute_bytes)]
        results += [Finding("warning", problem) for problem in gathered_over_cp(resolved)]
    if resolved is not None and resolved.tp_size > 1:
        results += _uneven(resolved)
        results += _forward_findings(subject, setting, resolved)
    return results


def _errors_raised_by(check: Callable[[], object]) -> list[Finding]:
    try:
        check()
    except ParallelizeError as error:
        return [Finding("error", problem) for problem in error.problems]
    return []


# -- layouts ------------------------------------------------------------------------------------------------------


def _uneven(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Shards of different sizes: ranks with a small shard wait for the others."""
    reported: set[str] = set()
    for row in resolved.parameters.values():
        sizes = [row.layout.local_size(rank) for rank in range(resolved.tp_size)] if row.layout.dim is not None else [0]
        name = generic(row.fqn)
        if min(sizes) != max(sizes) and name not in reported:
            reported.add(name)
            what = (
                f"dim {row.layout.dim} of {name} ({list(row.layout.shape)}) gives shards of {max(sizes)} to "
                f"{min(sizes)}"
            )
            fix = (
                "correct, but ranks wait for the one with the largest shard; pad the size to a multiple of tp where "
                "that matters"
            )
            yield Finding("warning", Problem("uneven-shards", what, row.rule.where, fix=fix))


# -- the forward --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Forwards:
    """The shapes of the unsharded forward and of the planned forward, and the plan.

    attention: the attention implementation that ran; "" for the model's own.
    """

    unsharded: ForwardShapes
    planned: ForwardShapes
    resolved: ResolvedPlan
    attention: str = ""

    def pair(self, name: str) -> tuple[CallShapes, CallShapes] | None:
        """(planned call, unsharded call) of a module; None where one of them did not happen."""
        planned, unsharded = self.planned.calls.get(name), self.unsharded.calls.get(name)
        return None if planned is None or unsharded is None else (planned, unsharded)


def _forward_findings(subject: Subject, setting: Setting, resolved: ResolvedPlan) -> Iterator[Finding]:
    model = subject.model(setting.weights_dtype)
    forwards = _Forwards(*run_forwards(subject, setting), resolved)
    if forwards.unsharded.error is not None:
        text = str(forwards.unsharded.error).splitlines()[0]
        what = (
            f"the unsharded forward does not run on tensors without values ({text}): the planned forward is not checked"
        )
        yield Finding("warning", Problem("cannot-run-forward", what, fix="check by `parallelize verify`"))
        return
    if forwards.planned.error is not None:
        failed = _failed(forwards)
        if failed.slug in _OF_OPERATIONS:
            yield from _refused_operation(subject, setting, resolved, failed)
        else:
            yield Finding("error", failed)
        return
    for attention in _other_attentions(model):
        other = _Forwards(*run_forwards(subject, setting, attention), resolved, attention)
        if other.unsharded.error is None and other.planned.error is not None:
            yield Finding("error", _failed(other))
            return
    mistakes = [*_misread(forwards), *_output_is_a_shard(forwards), *_not_reduced(forwards)]
    yield from (Finding("error", problem) for problem in mistakes)
    if not mistakes and setting.ep == 1:
        yield from (
            Finding(severity, problem) for severity, problem in dims_findings(*built(subject, setting), resolved)
        )
    yield from (Finding("warning", problem) for problem in _never_called(forwards))


def _refused_operation(subject: Subject, setting: Setting, resolved: ResolvedPlan, failed: Problem) -> list[Finding]:
    """A forward that is refused for an operation, as the trace says it: with the module's name and the rule, and with
    parameters that were left full."""
    if setting.ep > 1:
        return [Finding("error", failed)]
    traced = [Finding(*found) for found in dims_findings(*built(subject, setting), resolved)]
    same = [finding for finding in traced if finding.problem.slug == failed.slug]
    return same or [Finding("error", failed), *(found for found in traced if found.problem.slug == "left-full")]


def _other_attentions(model: ModelFacts) -> Sequence[str]:
    """Attention implementations that read a layer's attributes where the model's own implementation reads shapes."""
    own = getattr(model.config, "_attn_implementation", None)
    return ("eager",) if own not in (None, "eager") and hasattr(model.root, "set_attn_implementation") else ()


def run_forwards(subject: Subject, setting: Setting, attention: str = "") -> tuple[ForwardShapes, ForwardShapes]:
    """(unsharded, planned) calls of modules, on meta, equal layers once.

    attention: an attention implementation instead of the model's own.
    """
    unsharded = forward_shapes(*built(subject, setting, attention))
    model, inputs = built(subject, setting, attention)
    with fake_mesh(MeshSpec(tp=setting.size("tp"))) as mesh:
        modes: dict[str, Any] = {
            "sequence_parallel": setting.sequence_parallel,
            "loss_parallel": setting.loss_parallel,
            "ep": setting.ep,
            "etp": setting.etp,
        }
        try:
            parallelize_module(model, mesh, subject.plan_for(setting), overlap="off", trace=False, **modes)
        except ParallelizeError as error:
            return unsharded, ForwardShapes(error=error)
        return unsharded, forward_shapes(model, inputs)


def built(subject: Subject, setting: Setting, attention: str = "") -> tuple[Any, dict[str, Any]]:
    """The model on meta, equal layers once, and inputs of its forward."""
    tp = setting.size("tp")
    classes = layer_classes(subject.layers(setting), subject.model(setting.weights_dtype))
    model: Any = subject.source.build("meta", dtype=getattr(torch, setting.weights_dtype))
    disable_dropout(model)  # whose masks are the caller's to install
    if attention:
        model.set_attn_implementation(attention)
    drop_represented(model, classes)
    with torch.device("meta"):
        inputs = subject.source.inputs(model, BATCH, -(-SEQUENCE // tp) * tp)
    return model, private.tree_map(without_values, inputs)


def _failed(forwards: _Forwards) -> Problem:
    """The planned forward raised where the unsharded one did not: shards of neighboring modules that do not match."""
    error, module, advice = forwards.planned.error, forwards.planned.failed_module, ""
    if isinstance(error, ParallelizeError) and error.slugs == ("shard-misread",):
        advice = "" if error.problems[0].fix == FIX_SHAPES else error.problems[0].fix
        error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(error, ParallelizeError):
        first = error.problems[0]
        if first.slug in _OF_OPERATIONS:
            return first
        return replace(first, rows=(*first.rows, *_suspects(forwards)))
    row, where = _nearest_rule(module, forwards.resolved)
    rows = [("module", generic(module)), ("error", str(error).splitlines()[0])]
    rows += [("attention", f"{forwards.attention} (attn_implementation)")] if forwards.attention else []
    pair = forwards.pair(module)
    if pair is not None and pair[0].inputs != pair[1].inputs:
        rows.append(("called with", _compared(*(_listed(call.inputs) for call in pair))))
    if row is not None:
        rows.append(("rule", f"{row.rule.pattern}: {row.rule.style}"))
    rows += list(_suspects(forwards))
    fix = (
        "give neighbors styles that match: `colwise` into `rowwise` with the same sizes, `gather` before, local head "
        "counts"
    )
    fix = advice or fix
    name = generic(module) or "the model itself"
    return Problem("layouts-do-not-meet", f"the forward of {name} cannot run on shards", where, tuple(rows), fix)


def _suspects(forwards: _Forwards) -> Iterator[tuple[str, str]]:
    """Likely causes of a failure: linears, called since the last `rowwise` one, whose output is full or whose input is
    a part of the sequence."""
    planned, resolved = forwards.planned, forwards.resolved
    matrices = {name for row in resolved.parameters.values() if len(row.layout.shape) == 2 for name in row.fact.names}
    recent: list[str] = []
    for name in planned.calls:
        if name == planned.failed_module and f"{name}.weight" in matrices:
            break
        if name in resolved.modules and resolved.modules[name].contract.traits.sums_output:
            recent = []
        elif f"{name}.weight" in matrices and name in forwards.unsharded.calls:
            recent.append(name)
    full_outputs, partial_inputs = [], []
    for name in recent:
        call, unsharded = planned.calls[name], forwards.unsharded.calls[name]
        if call.outputs and call.outputs[0][-1:] == unsharded.outputs[0][-1:]:
            full_outputs.append(generic(name))
        if call.inputs and call.inputs[0][1:2] != unsharded.inputs[0][1:2]:
            partial_inputs.append(generic(name.rpartition(".")[0]))
    if full_outputs:
        yield "before it", f"{', '.join(dict.fromkeys(full_outputs))}: full output, where a shard is needed"
    if partial_inputs:
        yield "not gathered", f"the input of {', '.join(dict.fromkeys(partial_inputs))}: a part of the sequence"


def _nearest_rule(name: str, resolved: ResolvedPlan) -> tuple[ModuleRow | None, str]:
    """(row, place in the plan's file) of a module's rule; else of the nearest module above it, or of one inside it."""
    ancestor = name
    while True:
        if ancestor in resolved.modules:
            return resolved.modules[ancestor], resolved.modules[ancestor].rule.where
        if not ancestor:
            break
        ancestor = ancestor.rpartition(".")[0]
    inside = next((row for fqn, row in resolved.modules.items() if fqn.startswith(name + ".")), None)
    return inside, inside.rule.where if inside is not None else resolved.plan.source


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes) or "no tensor"


def _compared(planned: str, unsharded: str) -> str:
    return f"{planned}; unsharded {unsharded}"


def _misread(forwards: _Forwards) -> Iterator[Problem]:
    """The innermost module that misreads a shape: its outputs are not shards of the unsharded ones, but its inputs are.

    A view that takes a local size for another one makes an output longer, or changes several of its dims. Modules that
    contain the misreading one, or that get its output, also have wrong outputs. So modules are visited in the order in
    which they return, and those whose inputs are wrong already are considered only if there is no other.
    """
    candidates: list[tuple[str, Shape, Shape]] = []
    for name, call in forwards.planned.innermost_first():
        unsharded = forwards.unsharded.calls.get(name)
        if unsharded is None or len(call.outputs) != len(unsharded.outputs):
            continue
        wrong = next((pair for pair in zip(call.outputs, unsharded.outputs, strict=True) if not _is_shard(*pair)), None)
        if wrong is None:
            continue
        candidates.append((name, *wrong))
        if len(call.inputs) == len(unsharded.inputs) and all(map(_is_shard, call.inputs, unsharded.inputs)):
            candidates = candidates[-1:]
            break
    for name, planned, full in candidates[:1]:
        _, where = _nearest_rule(name, forwards.resolved)
        rows = (("returns", _compared(str(list(planned)), str(list(full)))),)
        fix = "name the head counts and widths that its forward reads under `local:`"
        what = f"{generic(name) or 'the model itself'} misreads local shapes"
        yield Problem("misread-shape", what, where, rows, fix)


def _is_shard(shape: Shape, full: Shape) -> bool:
    """Whether a shape is `full`, or shorter in one dim."""
    if len(shape) != len(full):
        return False
    changed = [(size, full_size) for size, full_size in zip(shape, full, strict=True) if size != full_size]
    return len(changed) <= 1 and all(size < full_size for size, full_size in changed)


def _output_is_a_shard(forwards: _Forwards) -> Iterator[Problem]:
    """The model returns a shard that is not marked as one."""
    pair, planned, resolved = forwards.pair(""), forwards.planned, forwards.resolved
    if pair is None or len(pair[0].outputs) != len(pair[1].outputs):
        return
    call, unsharded = pair
    for shape, full, marked in zip(call.outputs, unsharded.outputs, call.marked, strict=True):
        if shape == full or marked or not _is_shard(shape, full):
            continue
        makers = [
            row
            for name, row in resolved.modules.items()
            if name in planned.calls and shape in planned.calls[name].outputs and row.contract.leave is Conversion.NONE
        ]
        row = makers[-1] if makers else None
        name = generic(row.fqn) if row is not None else "the model"
        where = row.rule.where if row is not None else resolved.plan.source
        rows = (("returns", _compared(str(list(shape)), str(list(full)))),)
        fix = "`colwise(output=full)`, or `colwise(output=vocabulary)` for a head under loss parallelism"
        what = f"what {name} returns is a shard, and leaves the model as if it were full"
        yield Problem("output-is-a-shard", what, where, rows, fix)
        return


def _not_reduced(forwards: _Forwards) -> Iterator[Problem]:
    """A replicated parameter without a sum of its gradient, though its module works on a part of the data."""
    resolved = forwards.resolved
    reported: set[str] = set()
    for row in resolved.parameters.values():
        name, owner = generic(row.fqn), row.fqn.rpartition(".")[0]
        if row.layout.dim is not None or row.partial or name in reported or not row.fact.requires_grad:
            continue
        contract = resolved.modules[owner].contract if owner in resolved.modules else None
        if contract is not None and (contract.adds_bias_after_sum or contract.enter is Conversion.LEAVE_REGION):
            continue  # its bias is added after the sum; it computes with all tokens on every rank
        pair = forwards.pair(owner)
        if pair is None or not _sees_a_part(*pair):
            continue
        reported.add(name)
        what = f"{name} is replicated, and {generic(owner)} works on a part of the data: its gradient is not summed"
        rows = (("called with", _compared(*(_listed(call.inputs) for call in pair))),)
        fix = "`replicate(gradient=partial)`, or `sequence` for a norm between blocks"
        yield Problem("gradient-not-reduced", what, row.rule.where, rows, fix)


def _sees_a_part(planned: CallShapes, unsharded: CallShapes) -> bool:
    return len(planned.inputs) == len(unsharded.inputs) and planned.inputs != unsharded.inputs


def _never_called(forwards: _Forwards) -> Iterator[Problem]:
    """A rule for a module that the forward does not call: its conversions and collectives do not happen."""
    calls = forwards.planned.calls
    active_parents = {name.rpartition(".")[0] for name in calls}
    reported: set[str] = set()
    for name, row in forwards.resolved.modules.items():
        if name in calls or name.rpartition(".")[0] not in active_parents or generic(name) in reported:
            continue
        reported.add(generic(name))
        what = f"{generic(name)} is planned, and this forward never calls it"
        yield Problem("never-called", what, row.rule.where, fix="name the module that is called, or check the inputs")
