"""`lint`: everything about a plan, a model and a mesh that can be known without running them on values.

Three layers: the file by itself; the file against the model's names, shapes and the mesh; and the planned forward on tensors
without values against the unsharded one, which shows layouts that do not meet and modules that see a part of the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from parallelize.analysis.fake_world import fake_mesh
from parallelize.analysis.likeness import likenesses, remember_outputs, thin_out
from parallelize.analysis.setting import Setting, check_setting, make_setting
from parallelize.analysis.shapes import Call, Forward, shapes_of
from parallelize.analysis.subject import Subject
from parallelize.apply import parallelize_module
from parallelize.errors import ParallelizeError, Problem
from parallelize.mesh import MeshSpec
from parallelize.model_source import source_of
from parallelize.plan.model import ModelFacts
from parallelize.plan.pattern import alternatives, generic, matches
from parallelize.plan.resolve import ModuleRow, ResolvedPlan
from parallelize.plan.schema import Plan
from parallelize.styles.contract import Edge

BATCH, SEQUENCE = 2, 24  # of the forward on meta; made divisible by tp


@dataclass(frozen=True)
class Finding:
    """A problem, and whether the plan must not be applied with it ("error") or may ("warning")."""

    severity: str
    problem: Problem


def lint_setting(subject: Subject, setting: Setting, world_size: int | None = None) -> list[Finding]:
    """Findings of one plan on one mesh, in one mode."""
    found: list[Finding] = []
    found += _raised(lambda: check_setting(setting))
    if world_size is not None and world_size != setting.mesh.world_size:
        what = f"{setting.mesh} makes {setting.mesh.world_size} ranks, and there are {world_size}"
        fix = f"change a size, or start {setting.mesh.world_size} processes"
        found.append(Finding("error", Problem("wrong-world-size", what, fix=fix)))
    found += _raised(lambda: subject.resolved(setting))
    if not found:
        found += _raised(lambda: subject.stages(setting))
    resolved = None if any(one.severity == "error" for one in found) else subject.resolved(setting)
    if resolved is not None and resolved.tp_size > 1:
        found += list(_uneven(resolved))
        found += list(_forward_findings(subject, setting, resolved))
    return found


def modes_of(subject: Subject, plan: Plan | None, setting: Setting) -> list[Setting]:
    """The settings to look at: what was asked for; without a word of it every mode that the plan serves."""
    if plan is None or setting.sequence_parallel is not None or setting.loss_parallel is not None:
        return [setting]
    modes = [setting]
    if plan.region is not None and setting.size("tp") > 1:
        modes.append(replace(setting, sequence_parallel=True))
    names = {*subject.model(setting.weights_dtype).aliases}
    heads = [rule for rule in plan.rules if "vocabulary" in rule.style.options.values()]
    if setting.size("tp") > 1 and any(
        matches(one, name) for rule in heads for one in alternatives(rule.pattern) for name in names
    ):
        modes.append(replace(modes[-1], loss_parallel=True))
    return modes


def lint(
    model: Any, plan: Any = None, mesh: str | MeshSpec = "tp=2", *, world_size: int | None = None, **options: Any
) -> list[Finding]:
    """What is wrong with a plan for a model and a mesh, errors first. Nothing is run on values, no device is needed.

    Args:
        model: as `read_model` takes it, or a function that builds the module. plan: as `parallelize_module` takes it.
        mesh: "pp=2,dp=4,tp=8". world_size: processes that there will be. options: fields of `Setting`; without a word on
            modes every mode that the plan serves is looked at.

    Returns: findings of severity "error" (the plan would be refused, fail, or compute other numbers) and "warning".
    """
    setting = make_setting(mesh, options)
    if "batch" not in options:
        setting = replace(setting, batch=setting.microbatches)
    return findings(Subject(source_of(model), plan), setting, world_size)


def findings(subject: Subject, setting: Setting, world_size: int | None = None) -> list[Finding]:
    """Findings in every mode, each once, errors first."""
    found: dict[tuple, Finding] = {}
    plan = None
    try:
        plan = subject.plan_for(setting)
    except ParallelizeError as error:
        return [Finding("error", problem) for problem in error.problems]
    for one in modes_of(subject, plan, setting):
        for finding in lint_setting(subject, one, world_size):
            problem = finding.problem
            found.setdefault((problem.slug, problem.where, problem.what), finding)
    return sorted(found.values(), key=lambda finding: finding.severity != "error")


def _raised(check: Any) -> list[Finding]:
    try:
        check()
    except ParallelizeError as error:
        return [Finding("error", problem) for problem in error.problems]
    return []


# -- layouts ------------------------------------------------------------------------------------------------------


def _uneven(resolved: ResolvedPlan) -> Iterator[Finding]:
    """Ranks that hold less than others wait for them."""
    said: set[str] = set()
    for row in resolved.parameters.values():
        sizes = [row.layout.local_size(rank) for rank in range(resolved.tp_size)] if row.layout.dim is not None else [0]
        name = generic(row.fqn)
        if min(sizes) != max(sizes) and name not in said:
            said.add(name)
            what = f"dim {row.layout.dim} of {name} ({list(row.layout.shape)}) gives shards of {max(sizes)} to {min(sizes)}"
            fix = "right, but the others wait for the largest; pad the size to a multiple of tp where that matters"
            yield Finding("warning", Problem("uneven-shards", what, row.rule.where, fix=fix))


# -- the forward --------------------------------------------------------------------------------------------------


def _forward_findings(subject: Subject, setting: Setting, resolved: ResolvedPlan) -> Iterator[Finding]:
    model = subject.model(setting.weights_dtype)
    reference, planned = forwards(subject, setting)
    if reference.error is not None:
        text = str(reference.error).splitlines()[0]
        what = f"the unsharded forward does not run on tensors without values ({text}), so shapes were not compared"
        yield Finding("warning", Problem("cannot-run-forward", what, fix="check by `parallelize verify`"))
        return
    if planned.error is not None:
        yield Finding("error", _failed(planned, reference, resolved))
        return
    for other in _other_attentions(model):
        stock, sharded = forwards(subject, setting, other)
        if stock.error is None and sharded.error is not None:
            yield Finding("error", _failed(sharded, stock, resolved, other))
            return
    yield from (Finding("error", problem) for problem in _misread(planned, reference, resolved))
    yield from (Finding("error", problem) for problem in _leaks(planned, reference, resolved))
    yield from (Finding("error", problem) for problem in _unreduced(planned, reference, resolved, model))
    yield from (Finding("warning", problem) for problem in _gathered_twice(planned, resolved))
    yield from (Finding("warning", problem) for problem in _never_called(planned, resolved))


def _other_attentions(model: ModelFacts) -> Sequence[str]:
    """Implementations that read a layer's attributes where the model's own reads shapes."""
    own = getattr(model.config, "_attn_implementation", None)
    return ("eager",) if own not in (None, "eager") and hasattr(model.root, "set_attn_implementation") else ()


def forwards(subject: Subject, setting: Setting, attention: str = "") -> tuple[Forward, Forward]:
    """(unsharded, planned) calls of modules, on meta, each kind of layer once. attention: instead of the model's own."""
    sequence = -(-SEQUENCE // setting.size("tp")) * setting.size("tp")
    layers = subject.layers(setting)
    found = []
    for spec in (None, MeshSpec(tp=setting.size("tp"))):
        model: Any = subject.source.build("meta", dtype=getattr(torch, setting.weights_dtype))
        if attention:
            model.set_attn_implementation(attention)
        alike = likenesses(layers, subject.model(setting.weights_dtype)).stands_for
        thin_out(model, alike)
        remember_outputs(model, set(alike.values()))
        with torch.device("meta"):
            inputs = subject.source.inputs(model, BATCH, sequence)
        if spec is None:
            found.append(shapes_of(model, inputs))
            continue
        with fake_mesh(spec) as mesh:
            modes: dict[str, Any] = dict(
                sequence_parallel=setting.sequence_parallel, loss_parallel=setting.loss_parallel
            )
            try:
                parallelize_module(model, mesh, subject.plan_for(setting), overlap="off", **modes)
            except ParallelizeError as error:
                found.append(Forward(error=error))
                continue
            found.append(shapes_of(model, inputs))
    return found[0], found[1]


def _failed(planned: Forward, reference: Forward, resolved: ResolvedPlan, attention: str = "") -> Problem:
    """The planned forward raised where the unsharded one did not: shards that do not meet."""
    error = planned.error
    if isinstance(error, ParallelizeError):
        first = error.problems[0]
        return replace(first, rows=(*first.rows, *_feeders(planned, reference, resolved)))
    row, rule = _nearest(planned.inside, resolved)
    rows = [("module", generic(planned.inside)), ("error", str(error).splitlines()[0])]
    rows += [("attention", f"{attention} (attn_implementation)")] if attention else []
    call, wanted = planned.calls.get(planned.inside), reference.calls.get(planned.inside)
    if call is not None and wanted is not None and call.given != wanted.given:
        rows.append(("called with", f"{_listed(call.given)}; unsharded {_listed(wanted.given)}"))
    if row is not None:
        rows.append(("rule", f"{row.rule.pattern}: {row.rule.style}"))
    rows += list(_feeders(planned, reference, resolved))
    fix = "give neighbours styles that meet: `colwise` into `rowwise` with the same sizes, `gather` before, local head counts"
    inside = generic(planned.inside) or "the model itself"
    return Problem("layouts-do-not-meet", f"the forward of {inside} cannot run on shards", rule, tuple(rows), fix)


def _feeders(planned: Forward, reference: Forward, resolved: ResolvedPlan) -> Iterator[tuple[str, str]]:
    """Linears called since the last row split that return a whole, or see a part of the sequence: likely the culprits."""
    held = {name for row in resolved.parameters.values() if len(row.layout.shape) == 2 for name in row.fact.names}
    since: list[str] = []
    for name in planned.calls:
        if name == planned.inside and f"{name}.weight" in held:
            break
        if name in resolved.modules and resolved.modules[name].contract.compute == "rowwise":
            since = []
        elif f"{name}.weight" in held and name in reference.calls:
            since.append(name)
    whole, parted = [], []
    for name in since:
        call, wanted = planned.calls[name], reference.calls[name]
        if call.returned and call.returned[0][-1:] == wanted.returned[0][-1:]:
            whole.append(generic(name))
        if call.given and call.given[0][1:2] != wanted.given[0][1:2]:
            parted.append(generic(name.rpartition(".")[0]))
    if whole:
        yield "before it", f"{', '.join(dict.fromkeys(whole))}: a whole, where a shard is needed"
    if parted:
        yield "not gathered", f"the input of {', '.join(dict.fromkeys(parted))}: a part of the sequence"


def _nearest(name: str, resolved: ResolvedPlan) -> tuple[ModuleRow | None, str]:
    """The rule of a module, or of the nearest one above it or inside it, and its place in the file."""
    above = name
    while True:
        if above in resolved.modules:
            return resolved.modules[above], resolved.modules[above].rule.where
        if not above:
            break
        above = above.rpartition(".")[0]
    inside = next((row for fqn, row in resolved.modules.items() if fqn.startswith(name + ".")), None)
    return inside, inside.rule.where if inside is not None else resolved.plan.source


def _listed(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes) or "no tensor"


def _misread(planned: Forward, reference: Forward, resolved: ResolvedPlan) -> Iterator[Problem]:
    """A module whose output has grown, or has shrunk in several dims: a view that took a local size for another."""
    for name, call in planned.calls.items():
        wanted = reference.calls.get(name)
        if wanted is None or not call.returned or len(call.returned) != len(wanted.returned):
            continue
        for got, full in zip(call.returned, wanted.returned, strict=True):
            if _explained(got, full):
                continue
            _, where = _nearest(name, resolved)
            rows = (("returns", f"{list(got)}; unsharded {list(full)}"),)
            fix = "name the head counts and widths that its forward reads under `local:`"
            what = f"{generic(name) or 'the model itself'} misreads local shapes"
            yield Problem("misread-shape", what, where, rows, fix)
            return  # what comes after it only follows from it


def _leaks(planned: Forward, reference: Forward, resolved: ResolvedPlan) -> Iterator[Problem]:
    """The model returns a shard that looks like a whole."""
    call, wanted = planned.calls.get(""), reference.calls.get("")
    if call is None or wanted is None or len(call.returned) != len(wanted.returned):
        return
    for got, full, marked in zip(call.returned, wanted.returned, call.marked, strict=True):
        if got == full or marked or not _explained(got, full):
            continue
        makers = [
            row
            for name, row in resolved.modules.items()
            if name in planned.calls and got in planned.calls[name].returned and row.contract.leave is Edge.NONE
        ]
        row = makers[-1] if makers else None
        name = generic(row.fqn) if row is not None else "the model"
        rows = (("returns", f"{list(got)}; unsharded {list(full)}"),)
        fix = "`colwise(output=full)`, or `colwise(output=vocabulary)` for a head under loss parallelism"
        what = f"what {name} returns is a shard, and leaves the model as if it were whole"
        yield Problem("output-is-a-shard", what, row.rule.where if row is not None else resolved.plan.source, rows, fix)
        return


def _explained(got: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """A shard is shorter in one dim at most."""
    if len(got) != len(full):
        return False
    changed = [(mine, whole) for mine, whole in zip(got, full, strict=True) if mine != whole]
    return len(changed) <= 1 and all(mine < whole for mine, whole in changed)


def _unreduced(planned: Forward, reference: Forward, resolved: ResolvedPlan, model: ModelFacts) -> Iterator[Problem]:
    """A whole parameter whose module works on a part of the data, and whose gradient nobody sums."""
    said: set[str] = set()
    for row in resolved.parameters.values():
        owner = row.fqn.rpartition(".")[0]
        contract = resolved.modules[owner].contract if owner in resolved.modules else None
        if row.layout.dim is not None or row.partial or generic(row.fqn) in said:
            continue
        if contract is not None and contract.compute == "rowwise":  # its bias is added to the sum
            continue
        call, wanted = planned.calls.get(owner), reference.calls.get(owner)
        if call is None or wanted is None or not _sees_a_part(call, wanted) or not row.fact.requires_grad:
            continue
        said.add(generic(row.fqn))
        what = (
            f"{generic(row.fqn)} is whole, and {generic(owner)} works on a part of the data: nobody sums its gradient"
        )
        rows = (("called with", f"{_listed(call.given)}; unsharded {_listed(wanted.given)}"),)
        fix = "`replicate(gradient=partial)`, or `sequence` for a norm between blocks"
        yield Problem("gradient-not-reduced", what, row.rule.where, rows, fix)


def _sees_a_part(call: Call, wanted: Call) -> bool:
    return len(call.given) == len(wanted.given) and call.given != wanted.given


def _gathered_twice(planned: Forward, resolved: ResolvedPlan) -> Iterator[Problem]:
    """Several modules that each convert one and the same input."""
    users: dict[int, list[str]] = {}
    for name, row in resolved.modules.items():
        call = planned.calls.get(name)
        if row.contract.enter in (Edge.COPY, Edge.GATHER_SEQUENCE) and call is not None and call.inputs:
            users.setdefault(call.inputs[0], []).append(name)
    said: set[str] = set()
    for names in users.values():
        parent = generic(names[0].rpartition(".")[0])
        if len(names) > 1 and parent not in said:
            said.add(parent)
            row = resolved.modules[names[0]]
            edge = row.contract.enter
            what = f"{', '.join(generic(name) for name in names)} each reduce the gradient of one input"
            if edge is Edge.GATHER_SEQUENCE:
                what = f"{', '.join(generic(name) for name in names)} each gather one input"
            fix = f"gather it once, where they lie: `{parent}: gather`"
            yield Problem("input-gathered-twice", what, row.rule.where, fix=fix)


def _never_called(planned: Forward, resolved: ResolvedPlan) -> Iterator[Problem]:
    """A rule for a module that the forward does not call: its edges and its collectives never happen."""
    if planned.error is not None:
        return
    above = {name.rpartition(".")[0] for name in planned.calls}
    said: set[str] = set()
    for name, row in resolved.modules.items():
        holder = name.rpartition(".")[0]
        if name in planned.calls or holder not in above or generic(name) in said:
            continue
        said.add(generic(name))
        what = f"{generic(name)} is planned, and this forward never calls it"
        yield Problem("never-called", what, row.rule.where, fix="name the module that is called, or check the inputs")
