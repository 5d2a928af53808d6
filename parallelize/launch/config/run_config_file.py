"""Reads the file of a run strictly: every mistake at once, with line and column; overrides say which argument they are.

Torch-free. `run_checks.py` has the checks of values that are right by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from parallelize.base.errors import CheckpointError, LaunchError, ParallelizeError, PlanError, Problem
from parallelize.base.files.paths import read_named
from parallelize.base.files.yaml_kinds import read_section
from parallelize.base.files.yaml_nodes import MAX_BYTES, Reader, compose
from parallelize.launch.config.run_checks import CHECKS, Check, problems_of
from parallelize.launch.config.run_config import RunConfig

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
    reader = Reader(source)
    try:
        root = compose(text, source)
    except PlanError as error:
        raise LaunchError(*error.problems) from None
    if isinstance(root, yaml.MappingNode):
        for argument in overrides:
            with reader.collecting(PlanError):
                override(reader, root, argument)
    values = read_section(reader, root, RunConfig, "the run", "")
    config = RunConfig(**values, source=source, text="\n".join([text, *overrides]), places=reader.places)
    if isinstance(root, yaml.MappingNode):
        reader.places[""] = reader.where(root)
        wrong = problems_of(config, reader.unread, (*CHECKS, *more_checks))
        if absent is not None:
            absent += [problem for problem in wrong if problem.slug == _ABSENT]
            wrong = [problem for problem in wrong if problem.slug != _ABSENT]
        reader.problems += wrong
    if reader.problems:
        raise LaunchError(*reader.in_order())
    return config


# -- overrides -------------------------------------------------------------------------------------------------------
# Arguments of the command line that replace values of a run's file: `steps=100`, `optimizer.lr=3e-4`. Torch-free.


_TEXT = "tag:yaml.org,2002:str"
_MAPPING = "tag:yaml.org,2002:map"
_NOTHING = "tag:yaml.org,2002:null"


def override(reader: Reader, root: yaml.MappingNode, text: str) -> None:
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


def _child(reader: Reader, parent: yaml.MappingNode, name: str, source: str) -> yaml.MappingNode:
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
    reader.origins[id(added)] = reader.where(node)
    parent.value = [(k, added if v is node else v) for k, v in parent.value]
    return added


def _named(name: str, near: yaml.Node, reader: Reader, source: str) -> yaml.ScalarNode:
    node = yaml.ScalarNode(_TEXT, name, near.start_mark, near.end_mark)
    reader.origins[id(node)] = source
    return node


def _mark(reader: Reader, node: yaml.Node, source: str) -> None:
    """A node and all that it contains are of an argument."""
    reader.origins[id(node)] = source
    for item in node.value if isinstance(node, yaml.CollectionNode) else ():
        for child in item if isinstance(item, tuple) else (item,):
            _mark(reader, child, source)


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
