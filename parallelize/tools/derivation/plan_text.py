"""A derived plan as a file that a person would write.

Torch-free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from parallelize.base.files.yaml_nodes import as_scalar
from parallelize.base.mesh import MeshSpec
from parallelize.base.pictures.html import document, figure, heading
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.pattern import generic, readable
from parallelize.plan.resolve import resolve
from parallelize.plan.resolved import ParameterRow, ResolvedPlan
from parallelize.plan.schema import SCHEMA_VERSION, Plan
from parallelize.tools.analysis.show.layer_chart import LayerStep, draw_layer, layer_steps
from parallelize.tools.derivation.patterns import nested, pattern_rules


@dataclass(frozen=True)
class Heading:
    """What a file says of itself.

    Attributes:
        about: lines of comments at the top.
        model_type, class_name: what the plan serves; one of them is empty.
        base: the name of the base model inside the model; empty: none.
    """

    about: tuple[str, ...]
    model_type: str = ""
    class_name: str = ""
    base: str = ""


@dataclass(frozen=True)
class Sections:
    """The content of a plan file, by names of modules. `whole`: why linears are not sharded. `gathered`: or not in a
    pair. `by_tensor`: modules whose code needs what is local in full too. `layers`: the list that stages, ZeRO and
    recompute divide, where no region names it. `attention`: kinds of attention over `cp`."""

    styles: Mapping[str, str]
    sizes: Mapping[str, str | int]
    replicated_below_tp: Sequence[str]
    local: Mapping[str, Mapping[str, str]]
    whole: Mapping[str, str]
    regions: Sequence[Mapping[str, str]] = ()
    allow: str = ""
    default: str = "replicate"
    gathered: Mapping[str, str] = field(default_factory=dict)
    by_tensor: frozenset[str] = frozenset()
    layers: str = ""
    attention: Mapping[str, str] = field(default_factory=dict)


def plan_text(heading: Heading, sections: Sections, names: Sequence[str]) -> str:
    """The file. `names`: of all modules and parameters, in the model's order."""
    lines = [f"# {line}" for line in heading.about]
    lines.append(f"schema_version: {SCHEMA_VERSION}")
    if heading.model_type:
        lines.append(f"model_type: {as_scalar(heading.model_type)}")
    elif heading.class_name:
        lines.append(f"classes: {as_scalar(heading.class_name)}")
    if heading.base:
        lines.append(f"base: {as_scalar(heading.base)}")
    if sections.sizes:
        lines.append("sizes:")
        lines += [f"  {as_scalar(name)}: {_size(name, sections)}" for name in sections.sizes]
    regions = [_mapping(region) for region in sections.regions]
    if len(regions) > 1:
        lines += ["sequence_parallel:", *(f"  - {region}" for region in regions)]
    else:
        lines += [f"sequence_parallel: {region}" for region in regions]
    if sections.layers:
        lines.append(f"pipeline: {_mapping({'layers': sections.layers})}")
    lines.append("tensor_parallel:")
    lines += _rules(sections, names)
    lines += _local(sections, names)
    kinds = pattern_rules(_readable(sections.attention), map(readable, names))
    lines += ["attention:", *(f"  {as_scalar(pattern)}: {kind}" for pattern, kind in kinds.items())] if kinds else []
    lines += (
        [f"allow: {sections.allow}  # such a line is not reached, or what it reads was proven"]
        if sections.allow
        else []
    )
    return "\n".join(lines) + "\n"


def _size(name: str, sections: Sections) -> str:
    source, is_shared = sections.sizes[name], name in sections.replicated_below_tp
    text = as_scalar(source, inside_braces=is_shared) if isinstance(source, str) else str(source)
    return f"{{from: {text}, below_tp: replicate}}" if is_shared else text


def _mapping(texts: Mapping[str, str]) -> str:
    """Texts by name, in braces."""
    pairs = ((as_scalar(key, inside_braces=True), as_scalar(text, inside_braces=True)) for key, text in texts.items())
    return "{" + ", ".join(f"{key}: {text}" for key, text in pairs) + "}"


def _rules(sections: Sections, names: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for pattern, style in nested(pattern_rules(_readable(sections.styles), map(readable, names))).items():
        if isinstance(style, str):
            lines.append(f"  {as_scalar(pattern)}: {style}")
        else:
            lines.append(f"  {as_scalar(pattern)}:")
            lines += [f"    {as_scalar(inner)}: {text}" for inner, text in style.items()]
    for word, reasons in (("gathered", sections.gathered), ("whole", sections.whole)):
        lines += [f"  # {word}: {', '.join(patterns)}: {reason}" for reason, patterns in _reasons(reasons).items()]
    if sections.default:
        lines.append(f'  "**": {sections.default}')
    return lines


def _readable(texts: Mapping[str, str]) -> dict[str, str]:
    return {readable(name): text for name, text in texts.items()}


def _reasons(whole: Mapping[str, str]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in whole.items():
        pattern = generic(readable(name))
        text = " ".join(generic(word) if "." in word else word for word in reason.split())
        if pattern not in reasons[text]:
            reasons[text].append(pattern)
    return reasons


def _local(sections: Sections, names: Sequence[str]) -> list[str]:
    """Attributes that become local, and arguments whose width does, which are `NAME.shape` among them."""
    attributes, inputs = {}, {}
    for module, sizes in sections.local.items():
        also = ", elsewhere=full" if module in sections.by_tensor else ""
        widths = {name.removesuffix(_SHAPE): f"width({size}{also})" for name, size in sizes.items() if has_width(name)}
        of_attributes = "" if widths else also  # which one of them says for all of the module
        attributes[module] = {name: f"{size}{of_attributes}" for name, size in sizes.items() if not has_width(name)}
        inputs[module] = widths
    return [*_section("local", attributes, names), *_section("local_inputs", inputs, names)]


_SHAPE = ".shape"


def has_width(name: str) -> bool:
    """Whether what becomes local is the width of an argument, rather than an attribute."""
    return name.endswith(_SHAPE)


def _section(title: str, of_modules: Mapping[str, Mapping[str, str]], names: Sequence[str]) -> list[str]:
    texts = {module: _mapping(dict(sorted(sizes.items()))) for module, sizes in of_modules.items() if sizes}
    rules = pattern_rules(_readable(texts), map(readable, names))
    return [f"{title}:", *(f"  {as_scalar(pattern)}: {text}" for pattern, text in rules.items())] if rules else []


# -- layer text ------------------------------------------------------------------------------------------------------
# One layer of each kind of a derived plan, as text and as a page of pictures: what each rank has, and what is sent.


def layer_text(model: nn.Module, plan: Plan, tp: int) -> str:
    """A table for each kind of layer: input, weight and output of its modules. In a weight, `/tp` marks the sharded
    dim."""
    resolved = _resolved(model, plan, tp, sequence_parallel=False)
    tables = []
    for layer in _layers(resolved):
        steps = list(layer_steps(resolved, layer))
        rows = [("module", "input", "weight", "output"), *(_row(step, layer) for step in steps)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        tables.append("\n".join([generic(layer), *(f"  {line}" for line in lines)]))
    return "\n\n".join(tables)


def layer_page(model: nn.Module, plan: Plan, tp: int) -> str:
    """A page with one picture for each kind of layer and mode that the plan serves."""
    title = f"{plan.name}: what is sharded over tp={tp}"
    body = [heading(title)]
    for sequence in (False, True) if plan.regions else (False,):
        resolved = _resolved(model, plan, tp, sequence)
        for layer in _layers(resolved):
            of_layer = f"{generic(layer)}{', sequence parallel' if sequence else ''}"
            body.append(figure(draw_layer(resolved, layer, of_layer)))
    return document(title, body)


def _resolved(model: nn.Module, plan: Plan, tp: int, sequence_parallel: bool) -> ResolvedPlan:
    return resolve(plan, describe(model), MeshSpec([("tp", tp)]), Options(sequence_parallel=sequence_parallel))


def _layers(resolved: ResolvedPlan) -> Iterator[str]:
    """The first layer of each kind: of lists of modules, those whose rules differ."""
    seen: set[tuple[str, ...]] = set()
    for fqn in resolved.modules:
        parts = fqn.split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdigit()]
        if not numbers:
            continue
        layer = ".".join(parts[: numbers[-1] + 1])
        rules = tuple(
            f"{name.removeprefix(layer)} {row.rule.style}"
            for name, row in resolved.modules.items()
            if name.startswith(layer + ".")
        )
        kind = (generic(layer), *rules)
        if rules and kind not in seen:
            seen.add(kind)
            yield layer


def _row(step: LayerStep, layer: str) -> tuple[str, str, str, str]:
    return step.row.fqn.removeprefix(layer + "."), step.reads, _weight(step.weight), step.writes


def _weight(weight: ParameterRow | None) -> str:
    if weight is None:
        return ""
    sizes = [f"{size}/tp" if dim == weight.layout.dim else str(size) for dim, size in enumerate(weight.fact.shape)]
    return f"[{', '.join(sizes)}]"
