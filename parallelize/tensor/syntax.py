"""The syntax tree of the source text of a function."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from typing import Any

# CPython 3.11 cannot build two syntax trees at once (SystemError: recursion depth mismatch)
_parsing = threading.Lock()


def parsed(function: Any) -> ast.Module | None:
    """The syntax tree of a function; None where there is no source to read."""
    with _parsing:
        try:
            return ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError):
            return None


def receiver(tree: ast.Module) -> str:
    """The name of a method's first argument, most often `self`; empty without one."""
    definition = tree.body[0]
    arguments = definition.args.args if isinstance(definition, ast.FunctionDef) else []
    return arguments[0].arg if arguments else ""


def own_attribute(node: ast.AST, receiver: str) -> str:
    """The name in `self.name`; empty for any other expression."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == receiver:
        return node.attr
    return ""


def own_path(node: ast.AST, receiver: str) -> str:
    """`name` of `self.name`, and `name.inner` of `self.name.inner`; empty for any other expression."""
    if name := own_attribute(node, receiver):
        return name
    outer = own_path(node.value, receiver) if isinstance(node, ast.Attribute) else ""
    return f"{outer}.{node.attr}" if outer and isinstance(node, ast.Attribute) else ""
