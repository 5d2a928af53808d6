"""`package.module:function` as a run's file names it, looked up in source text: no module is imported, no code runs.

Only what is certain is wrong. A module that makes its names when it is imported, one without source, and a function
that a decorator may change are left to the ranks, which import them. Torch-free.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from parallelize.base.errors import did_you_mean

_FORM = "package.module:function"
_MADE_AT_IMPORT = ("__getattr__", "globals(", "vars(", "setattr(", "exec(", "sys.modules", "import *")


@dataclass(frozen=True)
class WrongName:
    """What is wrong with a name. argument: the keyword argument that the function does not take; "" where one is
    missing; None otherwise."""

    what: str
    fix: str = _FORM
    argument: str | None = None


def wrong_function(text: str, arguments: Mapping[str, Any] | None) -> WrongName | None:
    """What is certainly wrong with `package.module:name`, or with the keyword arguments that it would get; None:
    nothing is.

    arguments: None where they are not known.
    """
    module, _, name = text.rpartition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return WrongName(f"cannot read {text!r}")
    if module in sys.modules:
        return None
    spec = _found(module)
    if spec is None or isinstance(spec, WrongName):
        return spec
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    try:
        source = Path(spec.origin).read_bytes()
        tree = ast.parse(source)
    except OSError:
        return None
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        return WrongName(f"{spec.origin}{line} is no Python: {getattr(error, 'msg', error)}", "correct the module")
    return _wrong_in(tree, source.decode(errors="replace"), spec, name, arguments)


def _found(module: str) -> ModuleSpec | WrongName | None:
    """The spec of a module; what is wrong where there certainly is none; None where that is not known."""
    here, missing = os.getcwd(), WrongName(f"no module is called {module!r}")
    sys.path.insert(0, here)  # as under `python -m`
    try:
        first, *rest = module.split(".")
        spec = importlib.util.find_spec(first)
        full = first
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return missing
            if not spec.origin or "__path__" in Path(spec.origin).read_text(encoding="utf-8", errors="replace"):
                return None
            full = f"{full}.{part}"
            spec = PathFinder.find_spec(full, list(spec.submodule_search_locations))
        return spec or missing
    except (ImportError, OSError, ValueError):
        return None
    finally:
        sys.path.remove(here)


def _wrong_in(
    tree: ast.Module, source: str, spec: ModuleSpec, name: str, arguments: Mapping[str, Any] | None
) -> WrongName | None:
    bound: dict[str, list[ast.AST]] = {}
    for known, node in _bound(tree.body):
        bound.setdefault(known, []).append(node)
    if name not in bound:
        if any(word in source for word in _MADE_AT_IMPORT) or _has_submodule(spec, name):
            return None
        names = [known for known in bound if not known.startswith("_")]
        return WrongName(f"{spec.name} ({spec.origin}) has no {name!r}", did_you_mean(name, names) if names else _FORM)
    last = bound[name][-1]
    is_plain = len(bound[name]) == 1 and isinstance(last, ast.FunctionDef) and not last.decorator_list
    if not is_plain or arguments is None:
        return None
    assert isinstance(last, ast.FunctionDef)
    return _wrong_arguments(last, arguments)


def _has_submodule(spec: ModuleSpec, name: str) -> bool:
    return any(
        PathFinder.find_spec(f"{spec.name}.{name}", [folder]) for folder in spec.submodule_search_locations or ()
    )


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """(name, what binds it) of a module's own names, also inside its `if`, `try`, `with` and loops."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0], statement
            continue
        for node in _own_nodes(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, node
        for _, value in ast.iter_fields(statement):
            yield from _bound(_statements(value))


def _statements(value: Any) -> list[ast.stmt]:
    """The statements of a block; those of handlers and cases too."""
    statements: list[ast.stmt] = []
    for item in value if isinstance(value, list) else ():
        if isinstance(item, ast.stmt):
            statements.append(item)
        elif isinstance(item, ast.ExceptHandler | ast.match_case):
            statements += item.body
    return statements


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement, without those of the statements in its blocks."""
    for _, value in ast.iter_fields(statement):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST) and not isinstance(item, ast.stmt | ast.ExceptHandler | ast.match_case):
                yield from ast.walk(item)


def _wrong_arguments(function: ast.FunctionDef, arguments: Mapping[str, Any]) -> WrongName | None:
    takes = function.args
    named = [argument.arg for argument in (*takes.args, *takes.kwonlyargs)]
    unknown = [name for name in arguments if name not in named]
    if unknown and takes.kwarg is None:
        fix = did_you_mean(unknown[0], named) if named else "it takes none"
        return WrongName(f"{function.name} takes no argument {unknown[0]!r}", fix, unknown[0])
    positional = [argument.arg for argument in (*takes.posonlyargs, *takes.args)]
    needed = positional[: len(positional) - len(takes.defaults)]
    needed += [item.arg for item, value in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if value is None]
    missing = [name for name in needed if name not in arguments or name not in named]
    if missing:
        return WrongName(f"{function.name} needs the argument {missing[0]!r}", f"give it: {{{missing[0]}: ...}}", "")
    return None
