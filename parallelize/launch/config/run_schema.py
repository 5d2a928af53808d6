"""The JSON schema of the file of a run, from the same metadata that the loader reads. Torch-free."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from parallelize.launch.config.run_config import RunConfig
from parallelize.plan.options import AUTO, AUTO_FLAGS, DTYPE_ALIASES, DTYPES, FLAGS, NAMES, NUMBERS, RECOMPUTE
from parallelize.plan.styles.contract import OVERLAPS

MOST = 10**9 - 1  # `yaml_nodes.is_decimal` reads 9 digits
FILE = Path(__file__).parent / "run.schema.json"
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_KINDS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "texts": _TEXTS,
    "real": {"type": "number"},
    "flag": {"type": "boolean"},
    "free": {"type": "object"},
    "seed_or_text": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MOST}, {"type": "string"}]},
    "mesh": {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer", "minimum": 1}},
        ]
    },
}


def run_schema() -> dict[str, Any]:
    """The schema, as `run.schema.json` has it."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "a run of `parallelize run`"}
    return {**head, **_object(RunConfig)}


def schema_text() -> str:
    return json.dumps(run_schema(), indent=2) + "\n"


def _object(cls: Any) -> dict[str, Any]:
    properties = {field.name: _property(field.metadata) for field in fields(cls) if field.metadata}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(metadata: Any) -> dict[str, Any]:
    described = _value(metadata)
    return _or_null(described) if metadata["nothing"] else described


def _or_null(described: dict[str, Any]) -> dict[str, Any]:
    """A property whose value may also be null."""
    if "anyOf" in described:
        return {**described, "anyOf": [*described["anyOf"], {"type": "null"}]}
    if "enum" in described:
        return {**described, "enum": [*described["enum"], None]}
    return {**described, "type": [described["type"], "null"]}


def _value(metadata: Any) -> dict[str, Any]:
    kind, about = metadata["kind"], {"description": metadata["meaning"]}
    if kind == "section":
        inner = _object(metadata["of"])
        named = metadata["of"].__name__ == "ModelSection"
        return {**about, "anyOf": [{"type": "string"}, inner]} if named else {**about, **inner}
    if kind == "count":
        return {**about, "type": "integer", "minimum": metadata.get("least", 1), "maximum": MOST}
    if kind == "choice":
        return {**about, "enum": list(metadata["choices"])}
    if kind == "options":
        return {**about, **_options()}
    bounds = {"least": "minimum", "above": "exclusiveMinimum", "most": "maximum"}
    limits = {bounds[name]: metadata[name] for name in bounds if name in metadata}
    if kind == "text" and metadata["filled"]:
        limits["minLength"] = 1
    return {**about, **_KINDS[kind], **limits}


def _options() -> dict[str, Any]:
    dtypes = (*DTYPES, *DTYPE_ALIASES)
    choices = {"overlap": OVERLAPS, "recompute": RECOMPUTE, "dtype": dtypes, "reduce_dtype": dtypes}
    properties: dict[str, Any] = {}
    for name in NAMES:
        if name in AUTO_FLAGS:
            properties[name] = {"enum": [True, False, AUTO]}
        elif name in FLAGS:
            properties[name] = {"type": "boolean"}
        elif name in NUMBERS:
            least, most = {"zero": (0, 3), "compare_every": (0, MOST)}.get(name, (1, MOST))
            properties[name] = {"type": "integer", "minimum": least, "maximum": most}
        elif name == "recompute_save":
            properties[name] = _TEXTS
        else:
            properties[name] = {"enum": list(choices[name])} if name in choices else {"type": "string"}
    properties = {name: _or_null(described) for name, described in properties.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}
