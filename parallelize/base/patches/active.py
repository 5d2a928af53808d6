"""The changes to other libraries that are made now. They are undone when the last planned model is gone, or where their
block ends.

Every `ModuleState` holds the lease. When no state of any model is left, the lease is gone, and with it all changes.
What another library has wrapped since cannot be undone without undoing its work: that stays, and does nothing to
modules without a plan.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, NamedTuple

from parallelize.base.errors import ModelError, Problem
from parallelize.base.package import FOLDER
from parallelize.base.patches.table import Patch, row_of

Undo = Callable[[], bool]
"""Undoes a change. Returns: False if another library has wrapped it since, and it stays."""

_OWNER = "_parallelize"
"""The attribute of `torch` that says which copy of this package has changed it: it is there while something is
changed."""
_MISSING: Any = object()
_lock = threading.RLock()
_lease: weakref.ref[Lease] | None = None


class _Change(NamedTuple):
    """in_block: it is undone by the block that made it."""

    row: Patch
    target: str
    undo: Undo
    in_block: bool = False


_active: dict[tuple[Any, ...], _Change] = {}
"""By the place and what was made there, so that nothing is made twice."""


class Copy:
    """This copy of the package, as others see it on `torch`."""

    folder = FOLDER


class Lease:
    """What all states of planned modules hold together. Copies of a model hold the same one.

    Attributes:
        notes: what the rooms that change something remember until all is undone.
    """

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def __copy__(self) -> Lease:
        return self

    def __deepcopy__(self, memo: dict) -> Lease:
        return self

    def __reduce__(self) -> Any:
        return lease, ()


def lease() -> Lease:
    """The lease of now, or a new one."""
    global _lease
    current = _lease_now()
    if current is None:
        with _lock:
            current = _lease_now() or Lease()
            _lease = weakref.ref(current)
            weakref.finalize(current, _undo_unused).atexit = False
    return current


def _lease_now() -> Lease | None:
    return None if _lease is None else _lease()


def _undo_unused() -> None:
    """Undo all changes that no block made, if no planned model lives."""
    with _lock:
        if _lease_now() is None:
            for key in [key for key, change in reversed(_active.items()) if not change.in_block]:
                _end(key)


def active() -> list[tuple[str, Patch]]:
    """(target, row) of what is changed now, in the order of the changes."""
    return [(change.target, change.row) for change in list(_active.values())]


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by `make` of it, if it has it, and `make` has not replaced it already.

    Args:
        owner: a module or class. name: of an attribute of it.
        make: from the attribute as it is; what it returns gets its name and docstring.

    Raises: ModelError `two-copies`; LookupError without a row.
    """
    if (id(owner), name, make) not in _active and hasattr(owner, name):
        stock = getattr(owner, name)
        change(owner, name, lambda: update_wrapper(make(stock), stock), make)


def change(owner: Any, name: str, make: Callable[[], Any], key: Any) -> None:
    """Set `owner.name` to what `make` returns, once for a key. Raises: as `replace`."""
    _begin_once((id(owner), name, key), _full_name(owner, name), lambda: _set(owner, name, make()))


def change_code(function: Any, name: str, make: Callable[[], Any], code: Any) -> None:
    """Let a function run other code, once: under whatever name others have it, it is the same function.

    Args:
        name: of a global of the function's module, which `code` reads; it is what `make` returns.
        code: with the parameters of the function's own, which keeps its defaults.

    Raises: as `replace`.
    """
    key = (id(function), "__code__", code)
    _begin_once(key, _full_name(function, "__code__"), lambda: _run_other_code(function, name, make(), code))


def handle(what: str, table: MutableMapping[Any, Any], key: Any, handler: Any) -> None:
    """Enter a handler in a table of another library, if it has none for the key. what: as in the table of patches."""
    if key not in table:
        _begin_once((id(table), key), what, lambda: _enter(table, key, handler))


def hook(what: str, register: Callable[[Any], Any], function: Callable[..., None]) -> None:
    """Register a hook of all modules or optimizers, once. register: PyTorch's function, which returns a handle."""
    _begin_once((register, function), what, lambda: _removal(register(function)))


@contextmanager
def within(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A block in which `owner.name` is `value`. Raises: LookupError without a row."""
    ended = begin(owner, name, value)
    try:
        yield
    finally:
        ended()


def begin(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set `owner.name` to a value. Returns: what ends it. Raises: LookupError without a row."""
    key = (object(),)
    with _lock:
        _active[key] = _Change(row_of(target := _full_name(owner, name)), target, _set(owner, name, value), True)
    return lambda: _end(key)


def refuse_other_copy() -> None:
    """Raises: ModelError `two-copies` where another copy of this package has planned models in this process."""
    other = getattr(sys.modules.get("torch"), _OWNER, Copy)
    if other is not Copy:
        same = "this one, imported twice" if other.folder == FOLDER else other.folder
        what = (
            f"another copy of parallelize has planned models in this process, and has changed PyTorch for them: {same}"
        )
        fix = f"one copy in a process (here: {FOLDER}); in a notebook, restart it, or delete those models first"
        raise ModelError(Problem("two-copies", what, fix=fix))


def _begin_once(key: tuple[Any, ...], target: str, make: Callable[[], Undo]) -> None:
    if key in _active:
        return
    with _lock:
        if key not in _active:
            row = row_of(target)
            refuse_other_copy()
            setattr(sys.modules["torch"], _OWNER, Copy)
            _active[key] = _Change(row, target, make())


def _end(key: tuple[Any, ...]) -> None:
    with _lock:
        if _active[key].undo():
            del _active[key]
        torch = sys.modules.get("torch")
        if all(change.in_block for change in _active.values()) and getattr(torch, _OWNER, None) is Copy:
            delattr(torch, _OWNER)


def _full_name(owner: Any, name: str) -> str:
    module = getattr(owner, "__module__", None)
    return f"{module}.{owner.__qualname__}.{name}" if module else f"{owner.__name__}.{name}"


def _set(owner: Any, name: str, value: Any) -> Undo:
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)

    def undo() -> bool:
        if vars(owner).get(name) is not value:
            return False
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
        return True

    return undo


def _run_other_code(function: Any, name: str, value: Any, code: Any) -> Undo:
    before, earlier = function.__code__, function.__globals__.get(name, _MISSING)
    function.__globals__[name] = value
    function.__code__ = code

    def undo() -> bool:
        if function.__code__ is not code:
            return False
        function.__code__ = before
        function.__globals__[name] = earlier
        if earlier is _MISSING:
            del function.__globals__[name]
        return True

    return undo


def _enter(table: MutableMapping[Any, Any], key: Any, handler: Any) -> Undo:
    table[key] = handler

    def undo() -> bool:
        if table.get(key) is handler:
            del table[key]
        return True

    return undo


def _removal(handle: Any) -> Undo:
    def undo() -> bool:
        handle.remove()
        return True

    return undo
