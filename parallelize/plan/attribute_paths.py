"""Paths into what an attribute holds: an item of a list, tuple or dict, a variable that a function closes over, an
argument of a `partial`.

`split_heads._axes_lengths.0.1` is the size in a tuple of pairs, `merge.heads` the variable `heads` of a lambda that is
the attribute `merge`. A container is never written to: whoever sets an inner value gets a copy of what is around it,
because lists and functions may be shared with other modules.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType
from typing import Any

_MOST_ITEMS = 16
"""Of a list or dict: longer ones are data, not sizes."""

_DEPTH = 3
"""How far integers inside of containers are looked for."""


def inner_items(value: Any) -> dict[str, Any]:
    """What a container holds, by the parts of a path that name it; empty for anything that is no container."""
    kind = type(value)
    if kind in (list, tuple):
        return {str(index): item for index, item in enumerate(value)}
    if kind is dict:
        return {key: item for key, item in value.items() if isinstance(key, str)}
    if kind is FunctionType:
        return dict(zip(value.__code__.co_freevars, map(_content, value.__closure__ or ()), strict=True))
    if kind is partial:
        return {**{str(index): item for index, item in enumerate(value.args)}, **value.keywords}
    return {}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


_SIMPLE = (int, float, str, bool, type(None), list, tuple, dict)


def is_settings(value: Any) -> bool:
    """Whether an object has fields of simple types alone, as a dataclass of sizes that all modules are given."""
    fields = getattr(value, "__dict__", None)
    return type(fields) is dict and bool(fields) and all(type(field) in _SIMPLE for field in fields.values())


def with_inner(value: Any, path: str, inner: Any) -> Any:
    """A copy of a container with another value at a path; containers on the way to it are copied too.

    Raises: KeyError where the path names nothing.
    """
    part, _, rest = path.partition(".")
    return with_items(value, {part: with_inner(inner_items(value)[part], rest, inner) if rest else inner})


def with_items(value: Any, items: dict[str, Any]) -> Any:
    """A copy of a container with other items, by the parts of a path that name them."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(items.get(str(index), item) for index, item in enumerate(value))
    if kind is dict:
        return {key: items.get(key, item) if isinstance(key, str) else item for key, item in value.items()}
    if kind is partial:
        args = [items.get(str(index), item) for index, item in enumerate(value.args)]
        return partial(value.func, *args, **{key: items.get(key, item) for key, item in value.keywords.items()})
    return _with_variables(value, items)


def _with_variables(function: FunctionType, items: dict[str, Any]) -> FunctionType:
    """The function with other values of variables that it closes over; the others it shares with the original."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(CellType(items[name]) if name in items else cell for name, cell in cells)
    changed = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    changed.__kwdefaults__ = function.__kwdefaults__
    changed.__dict__.update(function.__dict__)
    return changed


def mapped_integers(value: Any, change: Callable[[str, int], Any], path: str, depth: int = _DEPTH) -> Any:
    """A container with its integers changed, also those of containers in it; the same object where it has none.

    Args:
        change: from the path and the value of an integer to what stands there instead.
        path: of the container.
        depth: how many containers deep integers are looked for.
    """
    items = inner_items(value)
    if not depth or not items or len(items) > _MOST_ITEMS:
        return value
    new = {
        part: change(f"{path}.{part}", item)
        if type(item) is int
        else mapped_integers(item, change, f"{path}.{part}", depth - 1)
        for part, item in items.items()
    }
    changed = {part: item for part, item in new.items() if item is not items[part]}
    return with_items(value, changed) if changed else value


def dotted(root: Any, path: str) -> Any:
    """`root.a.b` for the path `a.b`, and `root.a[2]` for `a.2`; None where a part is missing, or cannot be read: of a
    config with other values in some layers."""
    value = root
    for part in path.split("."):
        try:
            is_item = isinstance(value, (list, tuple)) and part.isdigit() and int(part) < len(value)
            items = {} if is_item else inner_items(value)
            value = value[int(part)] if is_item else items[part] if part in items else getattr(value, part, None)
        except Exception:  # classes of transformers raise errors of their own
            return None
    return value
