"""The syntax tree of the source text of a function."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
from collections import Counter
from collections.abc import Mapping
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


def attribute_path(node: ast.AST, receiver: str, names: Mapping[str, str] | None = None) -> str:
    """`name` of `self.name`, and `name.inner` of `self.name.inner`; empty for any other expression. names: as of `local_names`."""
    if isinstance(node, ast.Name):
        return (names or {}).get(node.id, "")
    if name := own_attribute(node, receiver):
        return name
    outer = attribute_path(node.value, receiver, names) if isinstance(node, ast.Attribute) else ""
    return f"{outer}.{node.attr}" if outer and isinstance(node, ast.Attribute) else ""


def local_names(tree: ast.Module, receiver: str) -> dict[str, str]:
    """The paths of names that a method binds once: of `core = self.core` it is `core: "core"`, of `table = core.emb` `table: "core.emb"`."""
    nodes = list(ast.walk(tree))
    bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and len(node.targets) == 1]
    names: dict[str, str] = {}
    for node in sorted(assigned, key=lambda node: node.lineno):
        (target,) = node.targets
        path = attribute_path(node.value, receiver, names)
        if path and isinstance(target, ast.Name) and bound[target.id] == 1:
            names[target.id] = path
    return names
