"""Calls of `scaled_dot_product_attention` inside a stock forward, run by another function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class AttentionCalls(TorchFunctionMode):
    """While it is active, `scaled_dot_product_attention` runs `attend`, with the same arguments.

    Models of `transformers` that pass their attention by name are intercepted by its registry instead: see
    `axes/context/stock_attention.py`.
    """

    def __init__(self, attend: Callable[..., torch.Tensor]):
        super().__init__()
        self.attend = attend

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        run = self.attend if func is F.scaled_dot_product_attention else func
        return run(*args, **(kwargs or {}))
