"""Arguments of the command line that replace values of a run's file: `steps=100`, `optimizer.lr=3e-4`. Torch-free."""

from __future__ import annotations

import yaml

from parallelize.base.errors import PlanError, Problem
from parallelize.launch.config.run_reader import RunReader
from parallelize.plan.yaml_nodes import compose

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
