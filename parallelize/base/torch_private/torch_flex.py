"""`flex_attention` as a function that modes see and that other code can serve, as `scaled_dot_product_attention` is.

PyTorch writes it in Python, and lets no `TorchFunctionMode` see it. Models keep it under names of their own, and
compiled (`torch.compile(flex_attention)`), so that replacing a name of PyTorch would reach few of them. Here the
function stays, and its code is another one, which calls what serves it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch.overrides import (
    _get_current_function_mode_stack,
    handle_torch_function,
    has_torch_function,
)

from parallelize.base.patches import active as patches
from parallelize.base.torch_private.torch_dynamo import not_traced

T = torch.Tensor
_MODULE = "torch.nn.attention.flex_attention"
_GLOBAL = "_served_by_parallelize"
PARAMETERS = (
    *("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options"),
    "return_aux",
)
"""Of `flex_attention`, in its order (2.9)."""


def flex_module() -> Any:
    """PyTorch's module of `flex_attention`; None where nothing has imported it, so that no model calls it."""
    module = sys.modules.get(_MODULE)
    code = getattr(getattr(module, "flex_attention", None), "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return module if names == PARAMETERS else None


def call_flex_attention(
    query: T,
    key: T,
    value: T,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any,
) -> Any:
    """PyTorch's `flex_attention`, with all of its arguments by position, as what serves it gets them."""
    options = {"return_lse": return_lse, "kernel_options": kernel_options, "return_aux": return_aux}
    return flex_module().flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, **options)


def is_flex_attention(function: Any) -> bool:
    """Whether a function is PyTorch's `flex_attention`."""
    return getattr(function, "__module__", "") == _MODULE and function.__name__ == "flex_attention"


def is_block_mask(value: Any) -> bool:
    """Whether a value is a block mask of `flex_attention`."""
    return type(value).__module__ == _MODULE and type(value).__name__ == "BlockMask"


def uncompiled(function: Any) -> Any:
    """The function that `torch.compile` was called with; any other value unchanged (2.0)."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def serve_flex_attention(attend: Callable[..., Any]) -> None:
    """While a planned model lives, let modes see `flex_attention`, and `attend` serve calls that no mode takes.

    Args:
        attend: `attend(stock, query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux)`; stock is the function as PyTorch wrote it.

    Where nothing has imported `flex_attention`, or this version of PyTorch has other parameters, nothing is changed.
    """
    module = flex_module()
    if module is not None:
        patches.change_code(module.flex_attention, _GLOBAL, lambda: _Served(module, attend), _routed.__code__)


@contextmanager
def flex_attention_served(attend: Callable[..., Any]) -> Iterator[None]:
    """A block in which `attend` serves `flex_attention` in this thread, also while a planned model lives."""
    lease = patches.lease()
    serve_flex_attention(attend)
    outer, _calls.attend = _calls.attend, attend
    try:
        yield
    finally:
        _calls.attend = outer
        del lease


class _Served:
    """What the code of `flex_attention` calls."""

    def __init__(self, module: Any, attend: Callable[..., Any]):
        function = module.flex_attention
        self.function, self.attend = function, attend
        self.stock = FunctionType(function.__code__, function.__globals__, "flex_attention", function.__defaults__)
        self.stock.__kwdefaults__ = function.__kwdefaults__

    def __call__(self, query: T, key: T, value: T, *options: Any) -> Any:
        """options: all others of its arguments, in its order."""
        if torch.compiler.is_dynamo_compiling():
            if any(hasattr(mode, "attend_flex") for mode in _get_current_function_mode_stack()):
                return self.outside_of_graph(query, key, value, *options)
        elif has_torch_function((query, key, value)):
            named = dict(zip(PARAMETERS[3:], options, strict=True))
            return handle_torch_function(self.function, (query, key, value), query, key, value, **named)
        stock = self.compiled if _calls.in_graph else self.stock
        attend = _calls.attend or self.attend
        return attend(stock, query, key, value, *options)

    @not_traced
    def outside_of_graph(self, *arguments: Any) -> Any:
        """A call in code that is compiled, by a mode that a graph would not follow: the graph ends before it, and the
        kernel is compiled by itself."""
        outer, _calls.in_graph = _calls.in_graph, True
        try:
            return self(*arguments)
        finally:
            _calls.in_graph = outer

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        return torch.compile(self.stock)


class _Calls(threading.local):
    """in_graph: whether the call that runs is in code that is compiled. attend: what serves it in the inner block."""

    in_graph = False
    attend: Callable[..., Any] | None = None


_calls = _Calls()


def _routed(
    query,
    key,
    value,
    score_mod=None,
    block_mask=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel_options=None,
    *,
    return_aux=None,
):
    """Its code is run with the globals of PyTorch's module."""
    return _served_by_parallelize(  # type: ignore[name-defined] # noqa: F821
        *(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux)
    )
