"""Mistakes made mechanically in a plan, and what detects each: the checks before a run, `verify`, or nothing.

for mutant in mutants(load_plan("llama")):
    print(mutant.name, judge(mutant, "llama", ["tp=2"]))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parallelize.base.errors import ParallelizeError, PlanError
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.models.model_source import source_of
from parallelize.plan.pattern import alternatives, generic, matches
from parallelize.plan.resolve import resolve
from parallelize.plan.schema import LocalAttribute, Plan, Rule
from parallelize.plan.styles.style import StyleText
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.linting import findings
from parallelize.tools.analysis.subject import Subject
from parallelize.tools.verification.compare import Verification
from parallelize.tools.verification.configuration import Request, build_configuration
from parallelize.tools.verification.verify import verify

SWAPS = {  # styles that a user could confuse with a style
    "colwise": ("rowwise", "replicate", "sequence"),
    "rowwise": ("colwise", "replicate", "sequence"),
    "embedding": ("embedding_colwise", "replicate"),
    "embedding_colwise": ("embedding", "replicate"),
    "sequence": ("replicate", "replicate(gradient=partial)", "replicate(gradient=full)"),
    "replicate": ("sequence", "replicate", "replicate(gradient=partial)", "replicate(gradient=full)"),
    "gather": ("replicate", "sequence"),
    "experts": ("replicate", "replicate(gradient=partial)", "sequence"),
    "rms_norm": ("sequence", "replicate", "replicate(gradient=partial)", "replicate(gradient=full)"),
    "shard": ("replicate", "replicate(gradient=partial)"),
    "multihead": ("replicate", "replicate(gradient=partial)"),
    "scan": ("replicate", "gather"),
    "gated_norm": ("sequence", "replicate", "replicate(gradient=partial)"),
    "channel_norm": ("replicate", "replicate(gradient=partial)"),
}


@dataclass(frozen=True)
class Mutant:
    """A plan with one mistake, and the patterns of where it was made."""

    name: str
    plan: Plan
    patterns: tuple[str, ...]
    where: str = ""


@dataclass(frozen=True)
class Judgment:
    """By whom a mutant was caught: "lint", "verify", or "nobody" (the same numbers in every mode and mesh tried).

    Attributes:
        named: whether the message names the rule, or a module that it matches. near: or a parent or child of such a
            module. message: the text.
    """

    by: str
    named: bool = False
    near: bool = False
    message: str = ""
    verification: Verification | None = field(default=None, compare=False)


def mutants(plan: Plan) -> Iterator[Mutant]:
    """Every mistake: of each rule, each `local` attribute, each size, and the region."""
    for rule in plan.rules:
        yield from _dropped(plan, rule)
        yield from _swapped(plan, rule)
        yield from _options(plan, rule)
        yield from _units(plan, rule)
    for item in plan.local:
        yield from _local(plan, item)
    for name, size in plan.sizes.items():
        if size.replicate_below_tp:
            sizes = {**plan.sizes, name: replace(size, replicate_below_tp=False)}
            patterns = tuple(rule.pattern for rule in plan.rules if name in rule.style.unit)
            yield Mutant(f"{name}: not replicated below tp", replace(plan, sizes=sizes), patterns, size.where)
    for index, region in enumerate(plan.regions):
        if region.leave:
            regions = (*plan.regions[:index], replace(region, leave=""), *plan.regions[index + 1 :])
            mistake = f"region of {region.layers}: leave dropped"
            yield Mutant(mistake, replace(plan, regions=regions), (region.leave,), region.where)


def _with(plan: Plan, rule: Rule, style: StyleText | None, unclaimed: str = "") -> Plan:
    rules = []
    for other in plan.rules:
        if other is rule and style is None:
            continue
        rules.append(replace(other, style=style) if other is rule and style is not None else other)
    return replace(plan, rules=tuple(rules), on_unclaimed=unclaimed or plan.on_unclaimed)


def _mutant(plan: Plan, rule: Rule, change: str, style: StyleText | None, unclaimed: str = "") -> Mutant:
    return Mutant(
        f"{rule.pattern}: {rule.style} -> {change}", _with(plan, rule, style, unclaimed), (rule.pattern,), rule.where
    )


def _dropped(plan: Plan, rule: Rule) -> Iterator[Mutant]:
    if rule.style.word != "gather":
        yield _mutant(plan, rule, "dropped", None)
    yield _mutant(plan, rule, "dropped, unclaimed replicated", None, "replicate")


def _swapped(plan: Plan, rule: Rule) -> Iterator[Mutant]:
    from parallelize.plan.styles.notation import parse_style

    for text in SWAPS[rule.style.word]:
        style = parse_style(text)
        if style.word in ("colwise", "rowwise") and rule.style.unit:
            style = parse_style(f"{style.word}({rule.style.unit[0]})")
        if str(style) != str(rule.style):
            yield _mutant(plan, rule, str(style), style)


def _options(plan: Plan, rule: Rule) -> Iterator[Mutant]:
    """Each option left out, and the options that make an input or output full."""
    for key in rule.style.options:
        rest = {name: value for name, value in rule.style.options.items() if name != key}
        yield _mutant(plan, rule, f"without {key}", StyleText(rule.style.word, rest))
    for word, key, value in (("colwise", "output", "full"), ("rowwise", "input", "full"), ("colwise", "chunks", "2")):
        if (
            rule.style.word == word
            and rule.style.options.get(key) != value
            and not (key == "chunks" and rule.style.unit)
        ):
            style = StyleText(word, {**rule.style.options, key: value})
            yield _mutant(plan, rule, str(style), style)


def _units(plan: Plan, rule: Rule) -> Iterator[Mutant]:
    """Chunks in another order, fewer of them, or of another size."""
    units = rule.style.unit
    if not units:
        return
    others = {tuple(reversed(units)), (*units[1:], units[0]), units[:1], units[-1:], units[:-1]}
    others |= {tuple(other if unit == name else unit for unit in units) for name in units for other in plan.sizes}
    if len(units) == 1:
        others |= {units * 2, units * 3}
    for units_of_mutant in sorted(others - {units, ()}):
        style = StyleText(rule.style.word, {**rule.style.options, "unit": " + ".join(units_of_mutant)})
        yield _mutant(plan, rule, str(style), style)


def _local(plan: Plan, item: LocalAttribute) -> Iterator[Mutant]:
    rest = tuple(attribute for attribute in plan.local if attribute is not item)
    name = f"local {item.pattern}: {item.attribute}"
    yield Mutant(f"{name} dropped", replace(plan, local=rest), (item.pattern,), item.where)
    for other in plan.sizes:
        if other != item.size:
            changed = (*rest, replace(item, size=other))
            yield Mutant(f"{name} by {other}", replace(plan, local=changed), (item.pattern,), item.where)


# -- what detects it ---------------------------------------------------------------------------------------------------


def judge(
    mutant: Mutant,
    model: Any,
    meshes: Sequence[str],
    overrides: Mapping[str, Any] | None = None,
    *,
    lints: bool = True,
    full_size: bool = False,
) -> Judgment:
    """Try `lint` on each mesh in each mode, then `verify` on each mesh. lints: False replaces `lint` by the plan's
    checks.

    full_size: whether `verify` takes the model as it is.
    """
    for mesh in meshes:
        request = Request(model, mutant.plan, MeshSpec.parse(mesh), overrides or {}, full_size=full_size)
        judgment = _lint(mutant, request, lints)
        if judgment is not None:
            return judgment
    for mesh in meshes:
        try:
            verification = verify(model, mutant.plan, mesh, overrides=overrides, timeout_s=20.0, full_size=full_size)
        except ParallelizeError as error:
            return _of_problems(mutant, error)
        if not verification.ok:
            return _of_difference(mutant, verification)
    return Judgment("nobody")


def _lint(mutant: Mutant, request: Request, shapes: bool) -> Judgment | None:
    configuration = build_configuration(request)
    if shapes:
        source = source_of(request.model, request.overrides)
        subject = Subject(source.with_config(configuration.model.config), mutant.plan)
        errors = [
            finding.problem for finding in findings(subject, Setting(request.mesh)) if finding.severity == "error"
        ]
        return _of_problems(mutant, PlanError(*errors)) if errors else None
    facts = describe(configuration.model)
    for mode in configuration.modes():
        choices = {"sequence_parallel": mode.sequence_parallel, "loss_parallel": mode.loss_parallel}
        try:
            resolve(mutant.plan.with_options(**choices), facts, request.mesh.only("tp"))
        except PlanError as error:
            return _of_problems(mutant, error)
    return None


def _of_problems(mutant: Mutant, error: ParallelizeError) -> Judgment:
    text = str(error)
    locations = [p.where for p in error.problems]
    named = bool(mutant.where and mutant.where in locations) or any(_mentions(text, name) for name in _names(mutant))
    return Judgment("lint", named, named or any(_mentions(text, name) for name in _blocks(mutant)), text)


def _names(mutant: Mutant) -> list[str]:
    spelled = [name for pattern in mutant.patterns for name in alternatives(pattern)]
    return [*mutant.patterns, *map(generic, spelled)]


def _blocks(mutant: Mutant) -> list[str]:
    """The modules of a layer that contain what the mistake is in, such as the attention around a table."""
    blocks = []
    for name in _names(mutant):
        while "*" in (name := name.rpartition(".")[0]) and not name.endswith("*"):
            blocks.append(name)
    return blocks


def _mentions(text: str, name: str) -> bool:
    """Of the rule for all that no other claims, a message that says which parameters have none."""
    return name in text or (name == "**" and any(words in text for words in ("claimed by no rule", "no rule claims")))


def _of_difference(mutant: Mutant, verification: Verification) -> Judgment:
    difference = verification.difference
    if difference is None:
        return Judgment("verify", False, False, str(verification), verification)
    patterns = [alternative for pattern in mutant.patterns for alternative in alternatives(pattern)]
    named = any(matches(pattern, difference.module) for pattern in patterns)
    named = named or any(
        difference.rule.removeprefix("local ").startswith(f"{pattern}:") for pattern in mutant.patterns
    )
    near = named or any(_is_parent_or_child(name, generic(difference.module)) for name in _names(mutant))
    near = near or any(
        matches(pattern, name) or name in _names(mutant) for pattern in patterns for name, _ in difference.others
    )
    return Judgment("verify", named, near, str(difference), verification)


def _is_parent_or_child(name: str, other: str) -> bool:
    """Whether one module contains the other."""
    return name.startswith(other + ".") or other.startswith(name + ".")
