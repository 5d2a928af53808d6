"""Reads the file of a run strictly: every mistake at once, with line and column; overrides say which argument they are.

Torch-free.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from parallelize.errors import LaunchError, ModelError, ParallelizeError, PlanError, Problem
from parallelize.launch.config.run_config import SCHEMA_VERSION, RunConfig
from parallelize.mesh import SAMPLE_AXES, MeshSpec
from parallelize.plan.block_formats import block_format
from parallelize.plan.options import AUTO_FLAGS, FLAGS, NAMES, NUMBERS, Options
from parallelize.plan.yaml_nodes import Reader, compose

_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")


class RunReader(Reader):
    """A reader that names the argument of a value which the command line gave."""

    def __init__(self, source: str):
        super().__init__(source)
        self.arguments: dict[int, str] = {}  # by id of a node, which the document keeps

    def where(self, node: yaml.Node) -> str:
        return self.arguments.get(id(node)) or super().where(node)

    def real(self, node: yaml.Node, what: str) -> float | None:
        """A finite decimal number; None after reporting."""
        if isinstance(node, yaml.ScalarNode) and node.style is None and _REAL.fullmatch(node.value):
            number = float(node.value)
            if math.isfinite(number):
                return number
        shown = node.value if isinstance(node, yaml.ScalarNode) else "no scalar"
        self.wrong(node, "wrong-type", f"{what} must be a number such as 0.1 or 3e-4, this is {shown!r}")
        return None

    def free(self, node: yaml.Node, what: str) -> Any:
        """Any plain value: numbers, text, true, false, null, lists, mappings."""
        if isinstance(node, yaml.MappingNode):
            return {name: self.free(value, name) for name, _, value in self.mapping(node, what)}
        if isinstance(node, yaml.SequenceNode):
            return [self.free(item, what) for item in node.value]
        assert isinstance(node, yaml.ScalarNode)
        if node.style is None and (_REAL.fullmatch(node.value) or node.value in ("true", "false", "null")):
            try:
                return json.loads(node.value)
            except json.JSONDecodeError:  # such as 1. or 007
                return float(node.value)
        return self.text(node, what)


def read_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the file of a run.

    Args:
        path: a YAML file.
        overrides: `key=value` or `section.key=value`, which replace what the file says.

    Raises: LaunchError `no-such-run`, or every mistake at once, each with its line and column or its argument.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise LaunchError(Problem("no-such-run", what, str(path), fix="the YAML file of a run: docs/run.md")) from None
    return parse_run_config(text, str(path), overrides)


def parse_run_config(text: str, source: str = "<run>", overrides: Sequence[str] = ()) -> RunConfig:
    """`read_run_config` of a text."""
    reader = RunReader(source)
    try:
        root = compose(text, source)
        for override in overrides:
            _override(reader, root, override)
    except PlanError as error:
        raise LaunchError(*error.problems) from None
    values = _section(reader, root, RunConfig, "the run")
    if not reader.problems:
        config = RunConfig(**values, source=source, text="\n".join([text, *overrides]))
        _check(reader, root, config)
    if reader.problems:
        raise LaunchError(*sorted(dict.fromkeys(reader.problems), key=_position))
    return config


# -- values -------------------------------------------------------------------------------------------------------


def _section(reader: RunReader, node: yaml.Node, cls: Any, what: str) -> dict[str, Any]:
    """The fields of a section that the file has."""
    by_name = {field.name: field for field in fields(cls) if field.metadata}
    values = {}
    for name, value_node in reader.known(node, what, set(by_name)).items():
        value = _value(reader, value_node, name, by_name[name].metadata)
        if value is not None:
            values[name] = value
    return values


def _value(reader: RunReader, node: yaml.Node, name: str, metadata: Any) -> Any:
    """The value of one field; None after reporting."""
    kind = metadata["kind"]
    if kind == "section":
        if metadata["of"].__name__ == "ModelSection" and isinstance(node, yaml.ScalarNode):
            return metadata["of"](name=reader.text(node, name) or "")
        return metadata["of"](**_section(reader, node, metadata["of"], name))
    if kind == "count":
        return _count(reader, node, name, metadata.get("least", 1))
    if kind == "choice":
        return _choice(reader, node, name, metadata["choices"])
    if kind == "free":
        if not isinstance(node, yaml.MappingNode):
            reader.wrong(node, "wrong-type", f"{name} must be a mapping")
            return None
        return reader.free(node, name)
    if kind == "seed_or_text":
        is_number = isinstance(node, yaml.ScalarNode) and node.style is None and node.value.isdigit()
        return reader.number(node, name) if is_number else reader.text(node, name)
    reads: dict[str, Callable[[yaml.Node, str], Any]] = {
        "text": reader.text,
        "texts": reader.texts,
        "flag": reader.flag,
        "real": reader.real,
    }
    reads |= {"mesh": lambda node, _: _mesh(reader, node), "options": lambda node, _: _options(reader, node)}
    return reads[kind](node, name)


def _count(reader: RunReader, node: yaml.Node, name: str, least: int) -> int | None:
    number = reader.number(node, name)
    if number is not None and number < least:
        reader.wrong(node, "bad-value", f"{name} is {number}", f"{least} or more")
    return number


def _choice(reader: RunReader, node: yaml.Node, name: str, choices: Sequence[str]) -> str | None:
    text = reader.text(node, name)
    if text is not None and text not in choices:
        reader.wrong(node, "bad-value", f"{name} is {text!r}", "one of: " + ", ".join(choices))
    return text


def _mesh(reader: RunReader, node: yaml.Node) -> MeshSpec | None:
    """`dp=2,tp=4`, a mapping of axes, or `auto`: None."""
    try:
        if isinstance(node, yaml.MappingNode):
            axes = [(name, reader.number(value, name)) for name, _, value in reader.mapping(node, "mesh")]
            return MeshSpec([(name, size) for name, size in axes if size is not None])
        text = reader.text(node, "mesh")
        return None if text in (None, "auto") else MeshSpec.parse(text)
    except ParallelizeError as error:
        for problem in error.problems:
            reader.wrong(node, problem.slug, problem.what, problem.fix)
    return None


def _options(reader: RunReader, node: yaml.Node) -> Options:
    values: dict[str, Any] = {}
    for name, value_node in reader.known(node, "options", set(NAMES)).items():
        value = _option(reader, name, value_node)
        if value is None:
            continue
        try:
            Options(**{name: value})
            values[name] = value
        except ParallelizeError as error:
            reader.wrong(value_node, error.problems[0].slug, error.problems[0].what, error.problems[0].fix)
    return Options(**values)


def _option(reader: RunReader, name: str, node: yaml.Node) -> Any:
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


# -- overrides ----------------------------------------------------------------------------------------------------


def _override(reader: RunReader, root: yaml.Node, text: str) -> None:
    """Replace one value of the document. Raises: PlanError `bad-override`, and as `compose`."""
    path, equals, value = text.partition("=")
    names = path.split(".")
    if not equals or not all(names) or not isinstance(root, yaml.MappingNode):
        raise PlanError(Problem("bad-override", f"cannot read {text!r}", fix="write steps=100 or optimizer.lr=3e-4"))
    source = f"argument {text}"
    node = (
        compose(value, source)
        if value
        else yaml.ScalarNode("tag:yaml.org,2002:str", "", root.start_mark, root.end_mark)
    )
    parent = root
    for name in names[:-1]:
        parent = _child(reader, parent, name, source)
    key_node = _named(names[-1], parent, reader, source)
    parent.value = [(k, v) for k, v in parent.value if k.value != names[-1]] + [(key_node, node)]
    _mark(reader, node, source)


def _child(reader: RunReader, parent: yaml.MappingNode, name: str, source: str) -> yaml.MappingNode:
    """The mapping of a section, which is added where the file has none, or text that is its name (`model: llama`)."""
    for key_node, node in parent.value:
        if key_node.value != name:
            continue
        if isinstance(node, yaml.MappingNode):
            return node
        if isinstance(node, yaml.ScalarNode):
            pair = (_named("name", node, reader, reader.where(node)), node)
            mapping = yaml.MappingNode("tag:yaml.org,2002:map", [pair], node.start_mark, node.end_mark)
            parent.value = [(k, mapping if v is node else v) for k, v in parent.value]
            return mapping
    added = yaml.MappingNode("tag:yaml.org,2002:map", [], parent.start_mark, parent.end_mark)
    _mark(reader, added, source)
    parent.value = [*parent.value, (_named(name, parent, reader, source), added)]
    return added


def _named(name: str, near: yaml.Node, reader: RunReader, source: str) -> yaml.ScalarNode:
    node = yaml.ScalarNode("tag:yaml.org,2002:str", name, near.start_mark, near.end_mark)
    reader.arguments[id(node)] = source
    return node


def _mark(reader: RunReader, node: yaml.Node, source: str) -> None:
    reader.arguments[id(node)] = source
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for child in pair:
                _mark(reader, child, source)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _mark(reader, child, source)


# -- checks that need several values ------------------------------------------------------------------------------


def _check(reader: RunReader, root: yaml.Node, config: RunConfig) -> None:
    """Mistakes of values that are right by themselves."""
    nodes = {k.value: v for k, v in root.value} if isinstance(root, yaml.MappingNode) else {}

    def wrong(key: str, slug: str, what: str, fix: str) -> None:
        reader.wrong(nodes.get(key, root), slug, what, fix)

    if config.schema_version != SCHEMA_VERSION:
        what = f"version {config.schema_version}; this release reads {SCHEMA_VERSION}"
        wrong("schema_version", "unknown-version", what, f"schema_version: {SCHEMA_VERSION}")
    if not config.model.name:
        wrong("model", "missing-key", "the run has no model", "model: llama, or {name: ..., set: {...}}")
    of_folder = [key for key in ("quantize", "lora") if getattr(config.model, key)]
    if of_folder and not isinstance(config.model.initialize, str):
        what = f"{' and '.join(of_folder)} of a model whose weights are drawn"
        wrong(
            "model", "missing-key", what, "model: {initialize: path/to/weights, ...}, a folder of Hugging Face's layout"
        )
    if config.model.quantize:
        try:
            block_format(config.model.quantize)
        except ModelError as error:
            wrong("model", error.problems[0].slug, error.problems[0].what, error.problems[0].fix)
    sources = [name for name in ("text", "jsonl", "function") if getattr(config.data, name)]
    if len(sources) != 1:
        what = f"data has {' and '.join(sources) or 'no source'}"
        wrong("data", "missing-key" if not sources else "bad-value", what, "one of text, jsonl and function")
    for path in (*config.data.text, *config.data.jsonl):
        if not Path(path).is_file():
            wrong("data", "no-such-file", f"there is no file {path}", f"paths are relative to {Path.cwd()}")
    if config.checkpoints.keep_every and not config.checkpoints.keep_last:
        wrong("checkpoints", "bad-value", "keep_every without keep_last removes nothing", "add keep_last")
    rewinds = "rewind" in (config.anomalies.nonfinite, config.anomalies.spike)
    if rewinds and not config.checkpoints.folder:
        wrong("anomalies", "missing-key", "rewind needs a checkpoint to go back to", "add checkpoints: {folder: ...}")
    if config.mesh is not None:
        _check_on_mesh(config, config.mesh, wrong)


def _check_on_mesh(config: RunConfig, mesh: MeshSpec, wrong: Any) -> None:
    for problem in config.options.complete().check_on(mesh):
        wrong("mesh", problem.slug, problem.what, problem.fix)
    data_ranks = mesh.ranks(*SAMPLE_AXES)
    if config.data.global_batch % data_ranks:
        what = f"global_batch {config.data.global_batch} does not divide over {data_ranks} data ranks"
        wrong("data", "indivisible-batch", what, f"a multiple of {data_ranks}")
        return
    batch = config.batch_of(mesh)
    microbatch = config.data.microbatch
    if microbatch is not None and config.options.num_microbatches is not None:
        wrong("data", "bad-value", "data.microbatch and options.num_microbatches say the same", "give one of them")
    elif microbatch is not None and batch % microbatch:
        what = f"{batch} rows of a data rank are no multiple of {microbatch} rows of a microbatch"
        wrong(
            "data",
            "indivisible-batch",
            what,
            "a divisor: " + ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0),
        )


def _position(problem: Problem) -> tuple[int, ...]:
    return tuple(int(part) for part in problem.where.split(":")[-2:] if part.isdigit())
