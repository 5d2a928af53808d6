"""Private names of torch for its random operations: a kernel between autograd and the device's own, which costs other operations nothing.

Every call of an operation passes the dispatch key `BackendSelect`, which has a kernel for factories alone (since 1.6). A kernel there
for the operations that draw sees each draw of the process, whoever calls it: functions of Python, PyTorch's own C++, a compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

_KEY = torch._C.DispatchKey.BackendSelect
_LATER = torch._C._dispatch_keyset_full_after(_KEY)
_libraries: list[Any] = []  # a kernel ends with its library

Serve = Callable[[str, Any, tuple, dict], Any]
"""(operation, PyTorch's own kernel, arguments, keywords) -> the result, or NotImplemented for that kernel's."""


def serve_draws(names: Iterable[str], serve: Serve) -> None:
    """Ask `serve` at each call of these operations, `name.overload` of aten. Once in a process: a later call changes nothing."""
    if _libraries:
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
