"""What the values of a YAML file may be, as data: a kind says how a value is read and how a JSON schema describes it.

A section of a file is a dataclass whose fields have kinds. `read_section` reads one and `schema_of` describes it, so
that a key is written once: with its kind, its meaning and its default.

No library carries this. pydantic collects all mistakes, but takes five times as long to import as YAML does, and reads
`no` as false and `010` as ten, also where it is strict. msgspec stops at the first mistake. cattrs gets values that
YAML has converted already. None of them keeps line and column, which are most of a message, or suggests a key.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import gt, le, lt
from typing import Any

import yaml

from parallelize.base.files.yaml_nodes import Reader, is_nothing

MOST = 10**9 - 1  # `is_decimal` reads 9 digits


@dataclass(frozen=True)
class Kind:
    """What a value may be.

    Attributes:
        read: (reader, node, dotted key) -> the value; None after reporting. Messages name the last part of the key.
        schema: of JSON Schema, without the description.
        of: the dataclass of a section.
    """

    read: Callable[[Reader, yaml.Node, str], Any]
    schema: Mapping[str, Any]
    of: Any = None


def name_of(key: str) -> str:
    """The last part of a dotted key."""
    return key.rpartition(".")[2]


def key(kind: Kind, meaning: str, default: Any) -> Any:
    """A field of a section.

    Args:
        kind: of its value.
        meaning: for the schema.
        default: where the file does not have it. A key whose default is nothing may be null.
    """
    metadata = {"kind": kind, "meaning": meaning, "nothing": default in (None, "", ())}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


# -- text and flags ----------------------------------------------------------------------------------------------------


def _filled(reader: Reader, node: yaml.Node, key: str) -> str | None:
    text = reader.text(node, name_of(key))
    if text == "":
        reader.wrong(node, "bad-value", f"{name_of(key)} is empty", "leave the key out for its default")
    return text


def _word(reader: Reader, node: yaml.Node, key: str) -> str | None:
    is_off = isinstance(node, yaml.ScalarNode) and node.value == "off"  # YAML reads a bare `off` as false
    return "off" if is_off else reader.text(node, name_of(key))


def _seed_or_text(reader: Reader, node: yaml.Node, key: str) -> int | str | None:
    is_number = isinstance(node, yaml.ScalarNode) and node.style is None and node.value.isdigit()
    return (reader.number if is_number else reader.text)(node, name_of(key))


def choice(*words: str) -> Kind:
    """One of these words."""
    return Kind(lambda reader, node, key: reader.choice(node, name_of(key), words), {"enum": list(words)})


_STRING: dict[str, Any] = {"type": "string"}
TEXT = Kind(lambda reader, node, key: reader.text(node, name_of(key)), _STRING)
FILLED_TEXT = Kind(_filled, {"type": "string", "minLength": 1})
WORD = Kind(_word, _STRING)
TEXTS = Kind(
    lambda reader, node, key: tuple(filter(None, reader.texts(node, name_of(key)))),
    {"anyOf": [_STRING, {"type": "array", "items": _STRING}]},
)
FLAG = Kind(lambda reader, node, key: reader.flag(node, name_of(key)), {"type": "boolean"})
FLAG_OR_AUTO = Kind(lambda reader, node, key: reader.flag_or_auto(node, name_of(key)), {"enum": [True, False, "auto"]})
SEED_OR_TEXT = Kind(_seed_or_text, {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MOST}, _STRING]})


# -- numbers -----------------------------------------------------------------------------------------------------------


_LIMITS: tuple[tuple[str, str, Callable[[float, float], bool]], ...] = (
    ("minimum", "{} or more", lt),
    ("exclusiveMinimum", "more than {}", le),
    ("maximum", "{} or less", gt),
)


def count(least: int = 1, most: int = MOST) -> Kind:
    """An integer within limits."""
    return _limited(Reader.number, {"type": "integer", "minimum": least, "maximum": most})


def real(least: float | None = None, above: float | None = None, most: float | None = None) -> Kind:
    """A finite number within limits; None: without one."""
    limits = {"minimum": least, "exclusiveMinimum": above, "maximum": most}
    return _limited(Reader.real, {"type": "number", **{name: n for name, n in limits.items() if n is not None}})


def _limited(read_number: Callable[[Reader, yaml.Node, str], Any], schema: dict[str, Any]) -> Kind:
    def read(reader: Reader, node: yaml.Node, key: str) -> Any:
        number = read_number(reader, node, name_of(key))
        for limit, fix, is_beyond in _LIMITS:
            if number is not None and limit in schema and is_beyond(number, schema[limit]):
                reader.wrong(node, "bad-value", f"{name_of(key)} is {number}", fix.format(schema[limit]))
        return number

    return Kind(read, schema)


# -- mappings ----------------------------------------------------------------------------------------------------------


def _free(reader: Reader, node: yaml.Node, key: str) -> dict[str, Any] | None:
    if not isinstance(node, yaml.MappingNode):
        reader.wrong(node, "wrong-type", f"{key} must be a mapping", f"{name_of(key)}: {{name: value}}")
        return None
    reader.places |= {f"{key}.{name.value}": reader.where(value) for name, value in node.value}
    return reader.free(node, key)


FREE = Kind(_free, {"type": "object"})
"""A mapping of any plain values."""


def section(cls: Any, short: str = "") -> Kind:
    """A section of keys. short: the field of which a text alone is the value."""

    def read(reader: Reader, node: yaml.Node, key: str) -> Any:
        if not short or not isinstance(node, yaml.ScalarNode):
            return cls(**read_section(reader, node, cls, name_of(key), key))
        text = reader.text(node, name_of(key))
        reader.unread |= {key} if text is None else set()
        return cls(**{short: text or ""})

    schema = schema_of(cls)
    return Kind(read, {"anyOf": [_STRING, schema]} if short else schema, cls)


def read_section(reader: Reader, node: yaml.Node, cls: Any, what: str, path: str) -> dict[str, Any]:
    """The fields of a section that the file has, by name. path: its dotted key."""
    known = {field.name: field.metadata for field in fields(cls) if field.metadata}
    if not isinstance(node, yaml.MappingNode):
        reader.unread.add(path)
    values = {}
    for name, value_node in reader.known(node, what, set(known)).items():
        key, kind = f"{path}.{name}".lstrip("."), known[name]["kind"]
        reader.places[key] = reader.where(value_node)
        if known[name]["nothing"] and is_nothing(value_node):
            continue
        before = len(reader.problems)
        value = kind.read(reader, value_node, key)
        if len(reader.problems) > before and kind.of is None:
            reader.unread.add(key)
        elif value is not None:
            values[name] = value
    return values


def schema_of(cls: Any) -> dict[str, Any]:
    """The JSON schema of a section."""
    return object_schema({field.name: _property(field.metadata) for field in fields(cls) if field.metadata})


def object_schema(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties)}


def _property(metadata: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": metadata["meaning"], **metadata["kind"].schema}
    return or_null(described) if metadata["nothing"] else described


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of values that may also be null."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]}
