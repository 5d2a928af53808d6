"""The files of the package, each read and parsed once for all rules."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import parallelize

ROOT = Path(parallelize.__file__).parent
PATHS = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, for reading only."""
    return ast.parse(path.read_text())


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree, walked once for all rules."""
    return tuple(ast.walk(tree))


def module_name(file: str) -> str:
    """`plan/parse.py` -> `plan.parse`."""
    return file.removesuffix(".py").replace("/", ".")
