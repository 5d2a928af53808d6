"""Reads what a plan file says over `tp`: sizes, rules, and attributes and inputs that become local.

These sections may also be under `when:`, for models whose config says so.

Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from parallelize.base.errors import PlanError
from parallelize.base.files.yaml_nodes import Reader, is_decimal
from parallelize.plan.pattern import check_pattern
from parallelize.plan.schema import Case, LocalAttribute, LocalInput, Rule, Size
from parallelize.plan.styles.notation import is_sum_of_sizes, parse_style
from parallelize.plan.styles.style import terms_of

Sections = Mapping[str, tuple[str, Callable[[Reader, yaml.Node, str], Any]]]
"""Key of a section -> the field of a `Plan` or a `Case` that it fills, and (reader, node, key) -> its value. Without a
field, the value is a dict of several."""

_CONDITION = re.compile(r"(not\s+)?([A-Za-z_][\w.]*)\Z")


def read_sections(reader: Reader, nodes: Mapping[str, yaml.Node], sections: Sections) -> dict[str, Any]:
    """The fields that the sections of a file fill. Mistakes are collected by the reader."""
    values: dict[str, Any] = {}
    for key, node in nodes.items():
        name, read = sections[key]
        value = read(reader, node, key)
        values |= {name: value} if name else value
    return values


def read_cases(reader: Reader, node: yaml.Node, key: str) -> tuple[Case, ...]:
    """`when:`: a condition on fields of the model's config, to the sections that hold where it is true."""
    cases = []
    for text, key_node, value in reader.mapping(node, key):
        parts = [_CONDITION.match(part.strip()) for part in text.split(" and ")]
        if not all(parts):
            reader.wrong(key_node, "bad-condition", f"cannot read {text!r}", "`field`, `not field`, joined by ` and `")
        condition = tuple((part[2], not part[1]) for part in parts if part)
        nodes = reader.known(value, f"when {text}", set(TENSOR_SECTIONS))
        cases.append(Case(condition, where=reader.where(key_node), **read_sections(reader, nodes, TENSOR_SECTIONS)))
    return tuple(cases)


def _sizes(reader: Reader, node: yaml.Node, key: str) -> dict[str, Size]:
    sizes = ((name, _size(reader, name, value)) for name, _, value in reader.mapping(node, key))
    return {name: size for name, size in sizes if size is not None}


def _size(reader: Reader, name: str, node: yaml.Node) -> Size | None:
    """A source, or that and what holds for fewer units than ranks."""
    replicate, where = False, reader.where(node)
    if isinstance(node, yaml.MappingNode):
        fields = reader.known(node, f"size {name}", {"from", "below_tp"})
        if "below_tp" in fields:
            replicate = reader.choice(fields["below_tp"], "below_tp", ("replicate", "refuse")) == "replicate"
        if "from" not in fields:
            reader.wrong(node, "missing-key", f"size {name} has no `from`")
            return None
        node = fields["from"]
    source = _size_source(reader, node, name)
    # a missing source is reported already; the size stays known, so that rules that name it are not reported too
    return Size(1 if source is None else source, replicate, where)


def _size_source(reader: Reader, node: yaml.Node, name: str) -> str | int | None:
    """A positive number, or the name of a config field."""
    fix = "a positive integer, or the config field that has it"
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value[:1] in tuple("+-.0123456789") + ("",):
        if is_decimal(node.value) and node.value != "0":
            return int(node.value)
        reader.wrong(node, "wrong-type", f"size {name} is {node.value or 'empty'}", fix)
        return None
    return reader.text(node, f"size {name}")


def read_rules(reader: Reader, node: yaml.Node, key: str) -> tuple[Rule, ...]:
    return tuple(_rules_below(reader, node, ""))


def _rules_below(reader: Reader, node: yaml.Node, prefix: str) -> Iterator[Rule]:
    for key, key_node, value in reader.mapping(node, prefix or "tensor_parallel"):
        pattern = f"{prefix}.{key}" if prefix else key
        if isinstance(value, yaml.MappingNode):
            yield from _rules_below(reader, value, pattern)
            continue
        optional, pattern = "?" in pattern, pattern.replace("?", "")
        if isinstance(value, yaml.ScalarNode) and not value.value:
            reader.wrong(value, "bad-style", f"{pattern} has no style", "write one, such as `replicate`")
            continue
        text = reader.text(value, f"the style of {pattern}")
        if text is None:
            continue
        with reader.collecting(PlanError):
            check_pattern(pattern, reader.where(key_node), defaults=True, root=True)
            yield Rule(pattern, parse_style(text, reader.where(value)), reader.where(key_node), optional)


def _local(reader: Reader, section: yaml.Node, key: str) -> Iterator[LocalAttribute]:
    for pattern, optional, node in _patterns(reader, section, key):
        for attribute, _, value in reader.mapping(node, f"local {pattern}"):
            text = reader.text(value, attribute)
            if text is None:
                continue
            where, if_present, attribute = reader.where(value), attribute.endswith("?"), attribute.removesuffix("?")
            elsewhere_full = _ELSEWHERE.search(text) is not None
            text = _ELSEWHERE.sub("", text)
            if is_sum_of_sizes(text) and ("*" in text or "+" in text):
                terms = terms_of(text)
                yield LocalAttribute(pattern, attribute, "", "", where, optional, terms, if_present, elsewhere_full)
            else:
                size, _, divide_by = (part.strip() for part in text.partition("/"))
                yield LocalAttribute(
                    pattern, attribute, size, divide_by, where, optional, (), if_present, elsewhere_full
                )


def _local_inputs(reader: Reader, section: yaml.Node, key: str) -> Iterator[LocalInput]:
    """`local_inputs:`: of modules, arguments that have a part for each head: `alibi: shard(0, unit=heads)`; and those
    whose width is read as a local one: `x: width(heads)`, or, beside shards, as the full one too: `x: width(heads,
    elsewhere=full)`."""
    for pattern, optional, node in _patterns(reader, section, key):
        for argument, _, value in reader.mapping(node, f"local_inputs {pattern}"):
            text, where = reader.text(value, argument), reader.where(value)
            if text is not None and (width := _WIDTH.fullmatch(text.strip())):
                yield LocalInput(pattern, argument, None, width[1], where, optional, bool(width[2]))
                continue
            try:
                is_style = text is not None and not text.strip().startswith("width(")
                style = parse_style(text, where) if text is not None and is_style else None
            except PlanError as error:
                reader.problems.extend(error.problems)
                continue
            if style is None or not style.traits.for_parameters or len(style.unit) != 1 or style.widths[0]:
                fix = "`shard(dim, unit=size)`, as `shard(0, unit=heads)`; `width(size)`; `width(size, elsewhere=full)`"
                reader.wrong(value, "bad-value", f"the input {argument} is {text!r}", fix)
                continue
            yield LocalInput(pattern, argument, int(style.options.get("dim", "0")), style.unit[0], where, optional)


_ELSEWHERE = re.compile(r"\s*,\s*elsewhere\s*=\s*full\s*$")
_WIDTH = re.compile(r"width\(\s*([A-Za-z_]\w*)\s*(,\s*elsewhere\s*=\s*full\s*)?\)")


def _patterns(reader: Reader, section: yaml.Node, key: str) -> Iterator[tuple[str, bool, yaml.Node]]:
    """(pattern, whether it may match nothing, value) of each entry of a section."""
    for pattern, key_node, node in reader.mapping(section, key):
        optional, pattern = "?" in pattern, pattern.replace("?", "")
        with reader.collecting(PlanError):
            check_pattern(pattern, reader.where(key_node), root=True)
        yield pattern, optional, node


TENSOR_SECTIONS: Sections = {
    "sizes": ("sizes", _sizes),
    "tensor_parallel": ("rules", read_rules),
    "local": ("local", lambda reader, node, key: tuple(_local(reader, node, key))),
    "local_inputs": ("local_inputs", lambda reader, node, key: tuple(_local_inputs(reader, node, key))),
}
"""The sections that may be under `when:`."""
