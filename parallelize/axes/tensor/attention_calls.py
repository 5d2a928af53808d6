"""Calls of PyTorch's attention functions inside a stock forward, run by other functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from parallelize.base.torch_private.torch_flex import is_flex_attention


class AttentionCalls(TorchFunctionMode):
    """While it is active, `scaled_dot_product_attention` runs `attend`, and `flex_attention` runs `attend_flex`, with
    the same arguments.

    Args:
        attend: None: it runs as PyTorch wrote it.
        attend_flex: with all arguments of `flex_attention`, in its order. A graph that is compiled finds it by this
            name. It may call `flex_attention` again, which modes that were entered earlier then see.

    Models of `transformers` that pass their attention by name are intercepted by its registry instead: see
    `axes/context/stock_attention.py`.
    """

    def __init__(self, attend: Callable[..., torch.Tensor] | None, attend_flex: Callable[..., Any]):
        super().__init__()
        self.attend, self.attend_flex = attend, attend_flex

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if is_flex_attention(func):
            return self.attend_flex(*args, *(kwargs or {}).values())  # all of its arguments, in its order
        run = self.attend if func is F.scaled_dot_product_attention and self.attend is not None else func
        return run(*args, **(kwargs or {}))
