"""The strict reader of a run's file: numbers, free values, and which argument of the command line a value is from. Torch-free."""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from parallelize.plan.yaml_nodes import MAX_SCALAR, Reader, is_flag, is_nothing

_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_TEXT = "tag:yaml.org,2002:str"
_LEADING_ZERO = re.compile(r"[+-]?0\d")


class RunReader(Reader):
    """A reader that names the argument of a value which the command line gave.

    Attributes:
        places: dotted key -> where its value is. unread: dotted keys whose values are wrong, so that nothing is to be concluded from them.
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
    """The number of a plain scalar; None of anything else, and of numbers with leading zeros, which YAML reads as octal."""
    if not isinstance(node, yaml.ScalarNode) or node.style is not None or len(node.value) > MAX_SCALAR:
        return None
    if not _REAL.fullmatch(node.value) or _LEADING_ZERO.match(node.value):
        return None
    try:
        return int(node.value)
    except ValueError:
        return float(node.value)
