"""Reads the file of a run strictly: every mistake at once, with line and column; overrides say which argument they are.

Torch-free. `run_checks.py` has the checks of values that are right by themselves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from parallelize.base.errors import CheckpointError, LaunchError, ParallelizeError, PlanError, Problem
from parallelize.base.files.paths import read_named
from parallelize.base.files.yaml_nodes import MAX_BYTES, MAX_SCALAR, Reader, compose, is_flag, is_nothing
from parallelize.base.mesh import MeshSpec
from parallelize.launch.config.run_checks import CHECKS, Check, problems_of
from parallelize.launch.config.run_config import ModelSection, RunConfig
from parallelize.plan.options import AUTO_FLAGS, FLAGS, NAMES, NUMBERS, Options

_ABSENT = "no-such-file"


def read_run_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    more_checks: Iterable[Check] = (),
    absent: list[Problem] | None = None,
) -> RunConfig:
    """Read the file of a run.

    Args:
        path: a YAML file.
        overrides: `key=value` or `section.key=value`, which replace what the file says.
        more_checks: after those of `run_checks.CHECKS`; their mistakes are reported together with all others.
        absent: of a run on other machines: gets the problems of files that are not on this one, which are then no
            mistakes.

    Raises: LaunchError `no-such-run`, or every mistake at once, each with its line and column or its argument.
    """
    try:
        text = read_named(Path(path), 4 * MAX_BYTES).decode("utf-8")
    except CheckpointError as error:
        raise LaunchError(*error.problems) from None
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise LaunchError(Problem("no-such-run", what, str(path), fix="the YAML file of a run: docs/run.md")) from None
    return parse_run_config(text, str(path), overrides, more_checks, absent)


def parse_run_config(
    text: str,
    source: str = "<run>",
    overrides: Sequence[str] = (),
    more_checks: Iterable[Check] = (),
    absent: list[Problem] | None = None,
) -> RunConfig:
    """`read_run_config` of a text."""
    reader = RunReader(source)
    try:
        root = compose(text, source)
    except PlanError as error:
        raise LaunchError(*error.problems) from None
    if isinstance(root, yaml.MappingNode):
        reader.problems += _overridden(reader, root, overrides)
    values = _section(reader, root, RunConfig, "the run", "")
    config = RunConfig(**values, source=source, text="\n".join([text, *overrides]), places=reader.places)
    if isinstance(root, yaml.MappingNode):
        reader.places[""] = reader.where(root)
        wrong = problems_of(config, reader.unread, (*CHECKS, *more_checks))
        if absent is not None:
            absent += [problem for problem in wrong if problem.slug == _ABSENT]
            wrong = [problem for problem in wrong if problem.slug != _ABSENT]
        reader.problems += wrong
    if reader.problems:
        raise LaunchError(*sorted(dict.fromkeys(reader.problems), key=_position))
    return config


def _overridden(reader: RunReader, root: yaml.MappingNode, overrides: Sequence[str]) -> list[Problem]:
    """Replace values of the document; the problems of those arguments that cannot be read."""
    problems: list[Problem] = []
    for argument in overrides:
        try:
            override(reader, root, argument)
        except PlanError as error:
            problems += error.problems
    return problems


def _position(problem: Problem) -> tuple[int, ...]:
    return tuple(int(part) for part in problem.where.split(":")[-2:] if part.isdigit())


# -- values -------------------------------------------------------------------------------------------------------


def _section(reader: RunReader, node: yaml.Node, cls: Any, what: str, path: str) -> dict[str, Any]:
    """The fields of a section that the file has. path: its dotted key."""
    by_name = {field.name: field for field in fields(cls) if field.metadata}
    if not isinstance(node, yaml.MappingNode):
        reader.unread.add(path)
    values = {}
    for name, value_node in reader.known(node, what, set(by_name)).items():
        key = f"{path}.{name}".lstrip(".")
        reader.places[key] = reader.where(value_node)
        if by_name[name].metadata["nothing"] and is_nothing(value_node):
            continue
        before = len(reader.problems)
        value = _value(reader, value_node, key, by_name[name].metadata)
        if len(reader.problems) > before and by_name[name].metadata["kind"] != "section":
            reader.unread.add(key)
        elif value is not None:
            values[name] = value
    return values


def _value(reader: RunReader, node: yaml.Node, key: str, metadata: Any) -> Any:
    """The value of one field; None after reporting."""
    kind, name = metadata["kind"], key.rpartition(".")[2]
    if kind == "section":
        if metadata["of"] is ModelSection and isinstance(node, yaml.ScalarNode):
            before, text = len(reader.problems), reader.text(node, name)
            reader.unread |= {"model"} if len(reader.problems) > before else set()
            return ModelSection(name=text or "")
        return metadata["of"](**_section(reader, node, metadata["of"], name, key))
    if kind == "free":
        return _free(reader, node, key)
    if kind == "seed_or_text":
        is_number = isinstance(node, yaml.ScalarNode) and node.style is None and node.value.isdigit()
        return reader.number(node, name) if is_number else reader.text(node, name)
    reads: dict[str, Callable[[], Any]] = {
        "text": lambda: _text(reader, node, name, metadata["filled"]),
        "texts": lambda: tuple(filter(None, reader.texts(node, name))),
        "flag": lambda: reader.flag(node, name),
        "count": lambda: _within(reader, node, name, reader.number(node, name), {"least": 1, **metadata}),
        "real": lambda: _within(reader, node, name, reader.real(node, name), metadata),
        "choice": lambda: _choice(reader, node, name, metadata["choices"]),
        "mesh": lambda: _mesh(reader, node),
        "options": lambda: _options(reader, node),
    }
    return reads[kind]()


def _free(reader: RunReader, node: yaml.Node, key: str) -> dict[str, Any] | None:
    if not isinstance(node, yaml.MappingNode):
        reader.wrong(node, "wrong-type", f"{key} must be a mapping", f"{key.rpartition('.')[2]}: {{name: value}}")
        return None
    reader.places |= {f"{key}.{name.value}": reader.where(value) for name, value in node.value}
    return reader.free(node, key)


def _text(reader: RunReader, node: yaml.Node, name: str, filled: bool) -> str | None:
    text = reader.text(node, name)
    if text == "" and filled:
        reader.wrong(node, "bad-value", f"{name} is empty", "leave the key out for its default")
    return text


def _within(reader: RunReader, node: yaml.Node, name: str, number: Any, metadata: Any) -> Any:
    """A number, after reporting that it is beyond its limits."""
    limits: list[tuple[str, str, Callable[[float], bool]]] = [
        ("least", "{} or more", lambda limit: number < limit),
        ("above", "more than {}", lambda limit: number <= limit),
        ("most", "{} or less", lambda limit: number > limit),
    ]
    for limit, fix, is_beyond in limits:
        if number is not None and limit in metadata and is_beyond(metadata[limit]):
            reader.wrong(node, "bad-value", f"{name} is {number}", fix.format(metadata[limit]))
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
            mesh = MeshSpec([(name, size) for name, size in axes if size is not None])
            names_none = not node.value
        else:
            text = reader.text(node, "mesh")
            if text in (None, "auto"):
                return None
            mesh = MeshSpec.parse(text or "")
            names_none = not mesh.axes
    except ParallelizeError as error:
        for problem in error.problems:
            reader.wrong(node, problem.slug, problem.what, problem.fix)
        return None
    if names_none:
        reader.wrong(node, "bad-mesh", "the mesh names no axis", "mesh: dp=1 for one process; or auto")
    return mesh


def _options(reader: RunReader, node: yaml.Node) -> Options:
    values: dict[str, Any] = {}
    for name, value_node in reader.known(node, "options", set(NAMES)).items():
        reader.places[f"options.{name}"] = reader.where(value_node)
        value = None if is_nothing(value_node) else _option(reader, name, value_node)
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


# -- overrides -------------------------------------------------------------------------------------------------------
# Arguments of the command line that replace values of a run's file: `steps=100`, `optimizer.lr=3e-4`. Torch-free.


_TEXT = "tag:yaml.org,2002:str"
_MAPPING = "tag:yaml.org,2002:map"
_NOTHING = "tag:yaml.org,2002:null"


def override(reader: RunReader, root: yaml.MappingNode, text: str) -> None:
    """Replace one value of the document. Raises: PlanError `bad-override`, and as `compose`."""
    path, equals, value = text.partition("=")
    names = path.split(".")
    if not equals or not all(names):
        raise PlanError(Problem("bad-override", f"cannot read {text!r}", fix="write steps=100 or optimizer.lr=3e-4"))
    source = f"argument {text}"
    node = compose(value, source) if value else yaml.ScalarNode(_TEXT, "", root.start_mark, root.end_mark)
    parent = root
    for name in names[:-1]:
        parent = _child(reader, parent, name, source)
    key_node = _named(names[-1], parent, reader, source)
    parent.value = [(k, v) for k, v in parent.value if k.value != names[-1]] + [(key_node, node)]
    _mark(reader, node, source)


def _child(reader: RunReader, parent: yaml.MappingNode, name: str, source: str) -> yaml.MappingNode:
    """The mapping of a section, which is added where the file has none, or text that is its name (`model: llama`).

    Raises: PlanError `bad-override` where there is another value.
    """
    added = yaml.MappingNode(_MAPPING, [], parent.start_mark, parent.end_mark)
    node = next((value for key, value in parent.value if key.value == name), None)
    if isinstance(node, yaml.MappingNode):
        return node
    if node is None:
        _mark(reader, added, source)
        parent.value = [*parent.value, (_named(name, parent, reader, source), added)]
        return added
    if name == "model" and node.tag == _TEXT:
        added.value = [(_named("name", node, reader, reader.where(node)), node)]
    elif node.tag != _NOTHING:
        raise PlanError(Problem("bad-override", f"{name} has no keys", source, fix=f"write {name}=VALUE"))
    _mark_here(reader, added, reader.where(node))
    parent.value = [(k, added if v is node else v) for k, v in parent.value]
    return added


def _named(name: str, near: yaml.Node, reader: RunReader, source: str) -> yaml.ScalarNode:
    node = yaml.ScalarNode(_TEXT, name, near.start_mark, near.end_mark)
    _mark_here(reader, node, source)
    return node


def _mark_here(reader: RunReader, node: yaml.Node, source: str) -> None:
    reader.arguments[id(node)] = source


def _mark(reader: RunReader, node: yaml.Node, source: str) -> None:
    """A node and all that it contains are of an argument."""
    _mark_here(reader, node, source)
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for child in pair:
                _mark(reader, child, source)
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _mark(reader, child, source)


# -- run reader ------------------------------------------------------------------------------------------------------
# The strict reader of a run's file: numbers, free values, and which argument of the command line a value is from.
# Torch-free.


_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_LEADING_ZERO = re.compile(r"[+-]?0\d")


class RunReader(Reader):
    """A reader that names the argument of a value which the command line gave.

    Attributes:
        places: dotted key -> where its value is. unread: dotted keys whose values are wrong, so that nothing is to be
            concluded from them.
    """

    def __init__(self, source: str):
        super().__init__(source)
        self.arguments: dict[int, str] = {}  # by id of a node, which the document keeps
        self.places: dict[str, str] = {}
        self.unread: set[str] = set()

    def where(self, node: yaml.Node) -> str:
        return self.arguments.get(id(node)) or super().where(node)

    def real(self, node: yaml.Node, what: str) -> float | None:
        """A finite decimal number; None after reporting."""
        if isinstance(node, yaml.ScalarNode) and _number(node) is not None and math.isfinite(float(node.value)):
            return float(node.value)
        shown = repr(node.value[:40]) if isinstance(node, yaml.ScalarNode) else "no scalar"
        self.wrong(
            node, "wrong-type", f"{what} must be a finite number, this is {shown}", "write a number such as 0.1 or 3e-4"
        )
        return None

    def free(self, node: yaml.Node, what: str) -> Any:
        """Any plain value: numbers, text, true, false, null, lists, mappings."""
        if isinstance(node, yaml.MappingNode):
            return {name: self.free(value, f"{what}.{name}") for name, _, value in self.mapping(node, what)}
        if isinstance(node, yaml.SequenceNode):
            return [self.free(item, f"an item of {what}") for item in node.value]
        assert isinstance(node, yaml.ScalarNode)
        if is_flag(node):
            return self.flag(node, what)
        is_empty_text = node.value == "" and node.tag == _TEXT  # of an argument `key=`
        if is_nothing(node) and not is_empty_text:
            return None
        if node.style is None and _REAL.fullmatch(node.value):
            number = _number(node)
            if number is None or (isinstance(number, float) and not math.isfinite(number)):
                shown = repr(node.value[:40])
                self.wrong(
                    node, "wrong-type", f"{what} is no number that can be read: {shown}", "quote it, if it is text"
                )
            return number
        return self.text(node, what)


def _number(node: yaml.Node) -> int | float | None:
    """The number of a plain scalar; None of anything else, and of numbers with leading zeros, which YAML reads as
    octal."""
    if not isinstance(node, yaml.ScalarNode) or node.style is not None or len(node.value) > MAX_SCALAR:
        return None
    if not _REAL.fullmatch(node.value) or _LEADING_ZERO.match(node.value):
        return None
    try:
        return int(node.value)
    except ValueError:
        return float(node.value)


# -- key of error ----------------------------------------------------------------------------------------------------
# The key of a run's file that an error is about, for what is only known when a rank builds the run. Torch-free.


_LABEL = "named by"


@contextmanager
def naming(config: RunConfig, *keys: str) -> Iterator[None]:
    """Give the problems of an error the places of these keys, which are given in the file; all of them may be its
    cause.

    Raises: the same error, of the same class.
    """
    try:
        yield
    except ParallelizeError as error:
        places = tuple((_LABEL, f"{config.place(key)}: {key}") for key in keys if key in config.places)
        if not places or any(label == _LABEL for problem in error.problems for label, _ in problem.rows):
            raise
        raise type(error)(*(_placed(problem, places) for problem in error.problems)) from error


def _placed(problem: Problem, places: tuple[tuple[str, str], ...]) -> Problem:
    if not problem.where and len(places) == 1:
        return replace(
            problem,
            where=places[0][1].rpartition(": ")[0],
            rows=(*problem.rows, ("key", places[0][1].rpartition(": ")[2])),
        )
    return replace(problem, rows=(*problem.rows, *places))
