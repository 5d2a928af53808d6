"""Loads plan files strictly: every mistake is reported with line and column, all at once.

Torch-free, so that `parallelize lint` starts fast.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from parallelize.base.errors import CheckpointError, ParallelizeError, PlanError, Problem, did_you_mean, near
from parallelize.base.files.paths import read_named
from parallelize.base.files.yaml_nodes import MAX_BYTES, Reader, compose
from parallelize.plan.options import AUTO_FLAGS, FLAGS, NUMBERS, Options
from parallelize.plan.options import NAMES as OPTION_NAMES
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
from parallelize.plan.tensor_sections import read_cases, read_tensor_sections

KEYS = {
    "schema_version",
    "model_type",
    "classes",
    "base",
    "sizes",
    "defaults",
    "tensor_parallel",
    "sequence_parallel",
    "local",
    "local_inputs",
    "when",
    "pipeline",
    "ties",
    "zero",
    "recompute",
    "attention",
    "positions",
    "packing",
    "allow",
}


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
    top = reader.known(compose(text, source), "the plan", KEYS)
    _check_version(reader, top, source)
    plan = Plan(
        name=name,
        model_types=_texts(reader, top, "model_type"),
        classes=_texts(reader, top, "classes"),
        base="".join(_texts(reader, top, "base")[:1]),
        **read_tensor_sections(reader, top),
        cases=tuple(read_cases(reader, top)),
        regions=_regions(reader, top),
        cuts=_cuts(reader, top),
        ties=tuple(_ties(reader, top)),
        zero_units=_units(reader, top, "zero"),
        recompute_units=_units(reader, top, "recompute"),
        attention=tuple(_attention(reader, top)),
        **_positions(reader, top),
        allow=_allowed(reader, top),
        options=_defaults(reader, top),
        source=source,
    )
    _check_rules(reader, top, plan, source)
    _check_sizes(reader, plan)
    _check_repeated(reader, plan)
    if reader.problems:
        raise PlanError(*sorted(dict.fromkeys(reader.problems), key=_position))
    return plan


def _check_version(reader: Reader, top: dict[str, yaml.Node], source: str) -> None:
    if "schema_version" not in top:
        reader.problems.append(
            Problem("no-version", "no schema_version", source, fix=f"add `schema_version: {SCHEMA_VERSION}`")
        )
        return
    version = reader.number(top["schema_version"], "schema_version")
    if version is not None and version != SCHEMA_VERSION:
        reader.wrong(
            top["schema_version"], "unknown-version", f"version {version}; this release reads {SCHEMA_VERSION}"
        )


def _allowed(reader: Reader, top: dict[str, yaml.Node]) -> tuple[str, ...]:
    slugs = _texts(reader, top, "allow")
    for slug in slugs:
        if slug not in ALLOWED:
            reader.wrong(top["allow"], "bad-value", f"allow names {slug!r}", "one of: " + ", ".join(ALLOWED))
    return slugs


def _texts(reader: Reader, top: dict[str, yaml.Node], key: str) -> tuple[str, ...]:
    return reader.texts(top[key], key) if key in top else ()


def _defaults(reader: Reader, top: dict[str, yaml.Node]) -> Options:
    """`defaults:`: any of the `Options`, where the caller chooses none."""
    values: dict[str, Any] = {}
    nodes = reader.known(top["defaults"], "defaults", set(OPTION_NAMES)) if "defaults" in top else {}
    for name, node in nodes.items():
        value = _option(reader, name, node)
        try:
            Options(**{name: value})
        except ParallelizeError as error:
            reader.wrong(node, "bad-value", error.problems[0].what, error.problems[0].fix)
        else:
            values[name] = value
    return Options(**values)


def _option(reader: Reader, name: str, node: yaml.Node) -> Any:
    """The value of one option; None after reporting."""
    if name in AUTO_FLAGS:
        return reader.flag_or_auto(node, name)
    if name in FLAGS:
        return reader.flag(node, name)
    if name in NUMBERS:
        return reader.number(node, name)
    if name == "recompute_save":
        return reader.texts(node, name)
    is_off = isinstance(node, yaml.ScalarNode) and node.value == "off"  # YAML reads a bare `off` as false
    return "off" if is_off else reader.text(node, name)


def _regions(reader: Reader, top: dict[str, yaml.Node]) -> tuple[RegionBounds, ...]:
    """One region, or a list of those of an encoder and a decoder."""
    if "sequence_parallel" not in top:
        return ()
    node = top["sequence_parallel"]
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not nodes:
        reader.wrong(node, "missing-key", "sequence_parallel is an empty list", "name the list of layers")
    regions = [_region(reader, item) for item in nodes]
    return tuple(region for region in regions if region is not None)


def _region(reader: Reader, node: yaml.Node) -> RegionBounds | None:
    fields = reader.known(node, "sequence_parallel", {"layers", "leave", "argument"})
    if "layers" not in fields:
        reader.wrong(node, "missing-key", "sequence_parallel has no `layers`", "name the list of layers")
        return None
    texts: dict[str, Any] = {key: reader.text(value, key) or "" for key, value in fields.items()}
    return RegionBounds(texts["layers"], texts.get("leave", ""), texts.get("argument", ""), reader.where(node))


def _cuts(reader: Reader, top: dict[str, yaml.Node]) -> Cuts | None:
    if "pipeline" not in top:
        return None
    node = top["pipeline"]
    fields = reader.known(node, "pipeline", {"layers", "first", "last", "every", "skips", "carry"})
    lists = {key: reader.texts(fields[key], key) for key in ("first", "last", "every", "carry") if key in fields}
    layers = (reader.text(fields["layers"], "layers") or "") if "layers" in fields else LONGEST_LIST
    skips = reader.mapping(fields["skips"], "skips") if "skips" in fields else ()
    pairs = ((key, reader.text(value, f"where {key} is used") or "") for key, _, value in skips)
    return Cuts(layers, **lists, skips=tuple(pairs), where=reader.where(node))


def _ties(reader: Reader, top: dict[str, yaml.Node]) -> Iterator[Tie]:
    for name, _, node in reader.mapping(top["ties"], "ties") if "ties" in top else ():
        members, reduce = node, "sum"
        if isinstance(node, yaml.MappingNode):
            fields = reader.known(node, f"tie {name}", {"members", "reduce"})
            if "members" not in fields:
                reader.wrong(node, "missing-key", f"tie {name} has no `members`", "list the tied parameters")
                continue
            members = fields["members"]
            reduce = (reader.text(fields["reduce"], "reduce") if "reduce" in fields else reduce) or reduce
            if reduce not in ("sum", "none"):
                reader.wrong(fields["reduce"], "bad-value", f"reduce is {reduce!r}", "sum or none")
        names = reader.texts(members, f"tie {name}")
        if len(set(names)) < 2:
            reader.wrong(node, "bad-value", f"tie {name} has {len(set(names))} members", "name two parameters or more")
        yield Tie(name, names, reduce, reader.where(node))


def _units(reader: Reader, top: dict[str, yaml.Node], key: str) -> tuple[str, ...]:
    if key not in top:
        return ()
    fields = reader.known(top[key], key, {"units"})
    units = reader.texts(fields["units"], "units") if "units" in fields else ()
    for unit in units:
        try:
            check_pattern(unit, reader.where(fields["units"]))
        except PlanError as error:
            reader.problems.extend(error.problems)
    return units


def _attention(reader: Reader, top: dict[str, yaml.Node]) -> Iterator[AttentionRule]:
    """`attention:`: `pattern: kind`, `pattern?: kind`, and `pattern with child: kind` for the modules that have such a
    child."""
    for key, key_node, node in reader.mapping(top["attention"], "attention") if "attention" in top else ():
        optional, (pattern, _, child) = "?" in key, key.replace("?", "").partition(" with ")
        kind = reader.text(node, f"the attention of {pattern}")
        if kind is not None and kind not in ATTENTION:
            reader.wrong(
                node, "bad-value", f"the attention of {pattern} is {kind!r}", "one of: " + ", ".join(ATTENTION)
            )
        try:
            check_pattern(pattern, reader.where(key_node))
            if child:
                check_pattern(child, reader.where(key_node))
            yield AttentionRule(pattern, kind or ATTENTION[0], child, optional)
        except PlanError as error:
            reader.problems.extend(error.problems)


def _positions(reader: Reader, top: dict[str, yaml.Node]) -> dict[str, Any]:
    """`positions: position_ids`, or `position_ids from attention_mask`; `packing: positions`, or `none`."""
    text = (reader.text(top["positions"], "positions") if "positions" in top else None) or "position_ids"
    words = text.split()
    if len(words) not in (1, 3) or words[1:2] not in ([], ["from"]):
        reader.wrong(
            top["positions"], "bad-value", f"positions is {text!r}", "an argument, `argument from mask`, or none"
        )
    packing = (reader.text(top["packing"], "packing") if "packing" in top else None) or "positions"
    if packing not in ("positions", "none"):
        reader.wrong(top["packing"], "bad-value", f"packing is {packing!r}", "positions or none")
    return {"positions": words[0], "positions_from": words[2] if len(words) == 3 else "", "packing": packing}


def _check_rules(reader: Reader, top: dict[str, yaml.Node], plan: Plan, source: str) -> None:
    if "tensor_parallel" not in top:
        reader.problems.append(Problem("missing-key", "no tensor_parallel rules", source, fix="add `tensor_parallel:`"))
    elif not plan.rules and not reader.problems:
        reader.wrong(top["tensor_parallel"], "missing-key", "tensor_parallel has no rules")


def _check_sizes(reader: Reader, plan: Plan) -> None:
    _check_sizes_of(reader, plan, plan.sizes)
    for case in plan.cases:
        _check_sizes_of(reader, case, plan.sizes | case.sizes)


def _check_sizes_of(reader: Reader, part: Plan | Case, sizes: dict[str, Size]) -> None:
    used = [(name, rule.where) for rule in part.rules for name in rule.style.sizes]
    used += [(name, item.where) for item in part.local for name in item.sizes]
    used += [(item.size, item.where) for item in part.local_inputs]
    for name, where in used:
        if name not in sizes:
            fix = did_you_mean(name, sizes) if sizes else f"add `sizes: {{{name}: ...}}`"
            reader.problems.append(Problem("unknown-size", f"no size is called {name!r}", where, fix=fix))


def _check_repeated(reader: Reader, plan: Plan) -> None:
    first: dict[str, Rule] = {}
    for rule in plan.rules:
        other = first.setdefault(rule.pattern, rule)
        if other is not rule:
            reader.problems.append(
                Problem("duplicate-key", f"{rule.pattern!r} has a rule at {other.where} already", rule.where)
            )


def _position(problem: Problem) -> tuple[int, ...]:
    return tuple(int(part) for part in problem.where.split(":")[-2:] if part.isdigit())


def _short(path: Path) -> str:
    """The path relative to the working directory, where the file is inside it."""
    try:
        return os.path.relpath(path) if not os.path.relpath(path).startswith("..") else str(path)
    except ValueError:  # another drive
        return str(path)
