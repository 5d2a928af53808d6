"""Private names of torch for its random operations: a kernel between autograd and the device's own, which costs other
operations nothing.

Every call of an operation passes the dispatch key `BackendSelect`, which has a kernel for factories alone (since 1.6).
A kernel there for the operations that draw sees each draw of the process, whoever calls it: functions of Python,
PyTorch's own C++, a compiled graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

_keys_after: Any = getattr(torch._C, "_dispatch_keyset_full_after", None)
_LATER = _keys_after(torch._C.DispatchKey.BackendSelect) if _keys_after is not None else None  # since 1.12
_libraries: list[Any] = []  # a kernel ends with its library

Serve = Callable[[str, Any, tuple, dict], Any]
"""(operation, PyTorch's own kernel, arguments, keywords) -> the result, or NotImplemented for that kernel's."""


def serve_draws(names: Iterable[str], serve: Serve) -> None:
    """Ask `serve` at each call of these operations, `name.overload` of aten. Once in a process: a later call changes
    nothing.

    Without the private name all draws are PyTorch's own, as the warning says.
    """
    if _libraries:
        return
    if _LATER is None:
        warnings.warn(
            "this version of torch does not let forwards draw the same on all ranks: seed them alike", stacklevel=2
        )
        return
    library = torch.library.Library("aten", "IMPL")
    for name in names:
        operation, _, overload = name.partition(".")
        stock = getattr(getattr(torch.ops.aten, operation), overload or "default")
        library.impl(name, partial(_kernel, serve, name, stock), "BackendSelect", with_keyset=True)
    _libraries.append(library)


def _kernel(serve: Serve, name: str, stock: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    run = partial(stock.redispatch, keys & _LATER)
    result = serve(name, run, args, kwargs)
    return run(*args, **kwargs) if result is NotImplemented else result


# -- torch modes -----------------------------------------------------------------------------------------------------
# Private names of torch for its modes, which intercept the operations of one thread.


def modes_of_this_thread() -> Callable[[], Any]:
    """A context manager for another thread, in which the modes that are active in this one intercept its operations
    too.

    The modes are not entered a second time, so what they have counted is kept (the stacks of both kinds: since 2.0).
    """
    functions, dispatch = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()

    @contextmanager
    def active() -> Iterator[None]:
        for mode in functions:
            _push_mode(mode)
        for mode in dispatch:
            _push_dispatch_mode(mode)
        try:
            yield
        finally:
            for mode in reversed(dispatch):
                _pop_dispatch_mode(getattr(mode, "_mode_key", None))
            for _ in functions:
                _pop_mode()

    return active
