"""Loads plan files strictly: every mistake is reported with line and column, all at once.

Torch-free, so that `parallelize lint` starts fast.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from parallelize.base.errors import CheckpointError, ParallelizeError, PlanError, Problem, did_you_mean, near
from parallelize.base.files.paths import read_named
from parallelize.base.files.yaml_kinds import choice
from parallelize.base.files.yaml_nodes import MAX_BYTES, Reader, compose
from parallelize.plan.options import KINDS, Options
from parallelize.plan.pattern import check_pattern
from parallelize.plan.schema import (
    ALLOWED,
    ATTENTION,
    LONGEST_LIST,
    SCHEMA_VERSION,
    AttentionRule,
    Case,
    Cuts,
    Plan,
    RegionBounds,
    Rule,
    Size,
    Tie,
)
from parallelize.plan.styles.style import REST, StyleText
from parallelize.plan.tensor_sections import TENSOR_SECTIONS, Sections, read_cases, read_rules, read_sections


def plans_folder() -> Path:
    """The folder of the shipped plans: in the installed package, or at the top of a source checkout."""
    installed = Path(__file__).parent.parent / "tp_plans"
    return installed if installed.is_dir() else Path(__file__).parent.parent.parent / "tp_plans"


def shipped_plans() -> dict[str, Path]:
    """The plans that come with the package.

    Returns: name to file, sorted by name.
    """
    return {path.stem: path for path in sorted(plans_folder().glob("*.yaml"))}


def load_plan(name_or_path: str | os.PathLike[str]) -> Plan:
    """Read a shipped plan by its name or by a model type that it serves, or any plan file by its path.

    Args:
        name_or_path: a key of `shipped_plans()`, a model type such as `qwen3_moe`, or a path (with a folder, or ending
            in `.yaml` or `.yml`).

    Returns: the plan, not yet matched with a model.

    Raises:
        PlanError: `no-such-plan`, or every mistake in the file at once, each with line and column.

    Cost: reads one file; no communication.
    """
    shipped = shipped_plans()
    text = os.fspath(name_or_path)
    if text in shipped:
        return read_plan(shipped[text])
    path = Path(text)
    if path.suffix in (".yaml", ".yml") or os.sep in text:
        return read_plan(path)
    by_type = {model_type: plan for plan in map(read_plan, shipped.values()) for model_type in plan.model_types}
    if text in by_type:
        return by_type[text]
    fix = did_you_mean(text, {*shipped, *by_type}) + " (or give a .yaml path)"
    raise PlanError(Problem("no-such-plan", f"no plan is called {text!r}, or serves that model type", fix=fix))


def read_plan(path: Path) -> Plan:
    """Read one file. Raises: PlanError."""
    try:
        raw = read_named(path, 4 * MAX_BYTES)
    except CheckpointError as error:
        raise PlanError(*error.problems) from None
    except OSError as error:
        fix = ", ".join(near(path.stem, shipped_plans()))
        fix = f"a shipped plan: {fix}" if fix else "`parallelize plans` lists the shipped ones"
        raise PlanError(Problem("no-such-plan", error.strerror or str(error), str(path), fix=fix)) from None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(Problem("bad-yaml", f"byte {error.start} is not UTF-8", str(path))) from None
    return parse_plan(text, source=_short(path), name=path.stem)


def parse_plan(text: str, source: str = "<text>", name: str = "plan") -> Plan:
    """Read plan text. Raises: PlanError with all problems, in the order of the file."""
    reader = Reader(source)
    top = reader.known(compose(text, source), "the plan", set(_SECTIONS))
    plan = Plan(name=name, source=source, **{"rules": (), **read_sections(reader, top, _SECTIONS)})
    _check_present(reader, top)
    _check_sizes(reader, plan)
    _check_repeated(reader, plan)
    if reader.problems:
        raise PlanError(*reader.in_order())
    return plan


def _check_present(reader: Reader, top: dict[str, yaml.Node]) -> None:
    if "schema_version" not in top:
        fix = f"add `schema_version: {SCHEMA_VERSION}`"
        reader.problems.append(Problem("no-version", "no schema_version", reader.source, fix=fix))
    if "tensor_parallel" not in top:
        fix = "add `tensor_parallel:`"
        reader.problems.append(Problem("missing-key", "no tensor_parallel rules", reader.source, fix=fix))


# -- sections: (reader, node, key) -> what the plan has ----------------------------------------------------------------


def _version(reader: Reader, node: yaml.Node, key: str) -> dict[str, Any]:
    version = reader.number(node, key)
    if version is not None and version != SCHEMA_VERSION:
        reader.wrong(node, "unknown-version", f"version {version}; this release reads {SCHEMA_VERSION}")
    return {}


def _module(reader: Reader, node: yaml.Node, key: str) -> str:
    return "".join(reader.texts(node, key)[:1])


def _allowed(reader: Reader, node: yaml.Node, key: str) -> tuple[str, ...]:
    slugs = reader.texts(node, key)
    for slug in slugs:
        if slug not in ALLOWED:
            reader.wrong(node, "bad-value", f"allow names {slug!r}", "one of: " + ", ".join(ALLOWED))
    return slugs


def _defaults(reader: Reader, node: yaml.Node, key: str) -> Options:
    """`defaults:`: any of the `Options`, where the caller chooses none."""
    values: dict[str, Any] = {}
    for name, value_node in reader.known(node, key, set(KINDS)).items():
        try:
            values |= Options(**{name: KINDS[name].read(reader, value_node, name)}).explicit()
        except ParallelizeError as error:
            reader.wrong(value_node, "bad-value", error.problems[0].what, error.problems[0].fix)
    return Options(**values)


def _rules(reader: Reader, node: yaml.Node, key: str) -> tuple[Rule, ...]:
    before, rules = len(reader.problems), read_rules(reader, node, key)
    if not rules and len(reader.problems) == before:
        reader.wrong(node, "missing-key", "tensor_parallel has no rules")
    return rules


def _regions(reader: Reader, node: yaml.Node, key: str) -> tuple[RegionBounds, ...]:
    """One region, or a list of those of an encoder and a decoder."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not nodes:
        reader.wrong(node, "missing-key", f"{key} is an empty list", "name the list of layers")
    regions = [_region(reader, item) for item in nodes]
    return tuple(region for region in regions if region is not None)


def _region(reader: Reader, node: yaml.Node) -> RegionBounds | None:
    fields = reader.known(node, "sequence_parallel", {"layers", "leave", "argument"})
    if "layers" not in fields:
        reader.wrong(node, "missing-key", "sequence_parallel has no `layers`", "name the list of layers")
        return None
    texts: dict[str, Any] = {key: reader.text(value, key) or "" for key, value in fields.items()}
    return RegionBounds(texts["layers"], texts.get("leave", ""), texts.get("argument", ""), reader.where(node))


def _cuts(reader: Reader, node: yaml.Node, key: str) -> Cuts:
    fields = reader.known(node, key, {"layers", "first", "last", "every", "skips", "carry"})
    lists = {name: reader.texts(fields[name], name) for name in ("first", "last", "every", "carry") if name in fields}
    layers = (reader.text(fields["layers"], "layers") or "") if "layers" in fields else LONGEST_LIST
    skips = reader.mapping(fields["skips"], "skips") if "skips" in fields else ()
    pairs = ((name, reader.text(value, f"where {name} is used") or "") for name, _, value in skips)
    return Cuts(layers, **lists, skips=tuple(pairs), where=reader.where(node))


def _ties(reader: Reader, node: yaml.Node, key: str) -> tuple[Tie, ...]:
    ties = (_tie(reader, name, value) for name, _, value in reader.mapping(node, key))
    return tuple(tie for tie in ties if tie is not None)


def _tie(reader: Reader, name: str, node: yaml.Node) -> Tie | None:
    """A list of parameters, or that and how their gradients are reduced."""
    members, reduce = node, "sum"
    if isinstance(node, yaml.MappingNode):
        fields = reader.known(node, f"tie {name}", {"members", "reduce"})
        if "members" not in fields:
            reader.wrong(node, "missing-key", f"tie {name} has no `members`", "list the tied parameters")
            return None
        members = fields["members"]
        if "reduce" in fields:
            reduce = reader.choice(fields["reduce"], "reduce", ("sum", "none")) or reduce
    names = reader.texts(members, f"tie {name}")
    if len(set(names)) < 2:
        reader.wrong(node, "bad-value", f"tie {name} has {len(set(names))} members", "name two parameters or more")
    return Tie(name, names, reduce, reader.where(node))


def _units(reader: Reader, node: yaml.Node, key: str) -> tuple[str, ...]:
    fields = reader.known(node, key, {"units"})
    units = reader.texts(fields["units"], "units") if "units" in fields else ()
    for unit in units:
        with reader.collecting(PlanError):
            check_pattern(unit, reader.where(fields["units"]))
    return units


def _attention(reader: Reader, node: yaml.Node, key: str) -> tuple[AttentionRule, ...]:
    """`attention:`: `pattern: kind`, `pattern?: kind`, and `pattern with child: kind` for the modules that have such a
    child."""
    rules = []
    for text, key_node, value in reader.mapping(node, key):
        optional, (pattern, _, child) = "?" in text, text.replace("?", "").partition(" with ")
        kind = reader.choice(value, f"the attention of {pattern}", ATTENTION)
        with reader.collecting(PlanError):
            for part in (pattern, child) if child else (pattern,):
                check_pattern(part, reader.where(key_node))
            rules.append(AttentionRule(pattern, kind or ATTENTION[0], child, optional))
    return tuple(rules)


def _positions(reader: Reader, node: yaml.Node, key: str) -> dict[str, str]:
    """`positions: position_ids`, or `position_ids from attention_mask`."""
    text = reader.text(node, key) or "position_ids"
    words = text.split() or [""]
    if len(words) not in (1, 3) or not words[0] or words[1:2] not in ([], ["from"]):
        reader.wrong(node, "bad-value", f"positions is {text!r}", "an argument, `argument from mask`, or none")
    return {"positions": words[0], "positions_from": words[2] if len(words) == 3 else ""}


_SECTIONS: Sections = {
    **TENSOR_SECTIONS,
    "schema_version": ("", _version),
    "model_type": ("model_types", Reader.texts),
    "classes": ("classes", Reader.texts),
    "base": ("base", _module),
    "defaults": ("options", _defaults),
    "tensor_parallel": ("rules", _rules),
    "sequence_parallel": ("regions", _regions),
    "when": ("cases", read_cases),
    "pipeline": ("cuts", _cuts),
    "ties": ("ties", _ties),
    "zero": ("zero_units", _units),
    "recompute": ("recompute_units", _units),
    "attention": ("attention", _attention),
    "positions": ("", _positions),
    "packing": ("packing", choice("positions", "none").read),
    "sequences": ("sequences", _module),
    "allow": ("allow", _allowed),
}


# -- what several sections must agree on -------------------------------------------------------------------------------


def _check_sizes(reader: Reader, plan: Plan) -> None:
    _check_sizes_of(reader, plan, plan.sizes)
    for case in plan.cases:
        _check_sizes_of(reader, case, plan.sizes | case.sizes)


def _check_sizes_of(reader: Reader, part: Plan | Case, sizes: dict[str, Size]) -> None:
    used = [(name, rule.where) for rule in part.rules for name in _named_sizes(rule.style)]
    used += [(name, item.where) for item in part.local for name in item.sizes]
    used += [(item.size, item.where) for item in part.local_inputs]
    for name, where in used:
        if name not in sizes:
            fix = did_you_mean(name, sizes) if sizes else f"add `sizes: {{{name}: ...}}`"
            reader.problems.append(Problem("unknown-size", f"no size is called {name!r}", where, fix=fix))


def _named_sizes(style: StyleText) -> list[str]:
    """The sizes that a plan must have: not the rest of a dim, which has no width."""
    return [name for name in style.sizes if name != REST or REST in style.widths]


def _check_repeated(reader: Reader, plan: Plan) -> None:
    first: dict[str, Rule] = {}
    for rule in plan.rules:
        other = first.setdefault(rule.pattern, rule)
        if other is not rule:
            reader.problems.append(
                Problem("duplicate-key", f"{rule.pattern!r} has a rule at {other.where} already", rule.where)
            )


def _short(path: Path) -> str:
    """The path relative to the working directory, where the file is inside it."""
    try:
        return os.path.relpath(path) if not os.path.relpath(path).startswith("..") else str(path)
    except ValueError:  # another drive
        return str(path)
