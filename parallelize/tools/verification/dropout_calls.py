"""Dropout that code calls as a function, turned off: its rate may be any attribute, or a number in the code, which no config has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from parallelize.state.randomness.dropout.call_sites import REFUSED_FUNCTIONS

_RATES: dict[Any, tuple[int, str]] = {
    **dict.fromkeys((F.dropout, torch.dropout, torch.dropout_, *REFUSED_FUNCTIONS), (1, "p")),
    F.scaled_dot_product_attention: (4, "dropout_p"),
    F.multi_head_attention_forward: (12, "dropout_p"),
}
"""Of each function with a rate, the position of that argument and its name."""


class WithoutDropout(TorchFunctionMode):
    """Calls every function that drops with a rate of zero, on the thread that enters this mode."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _RATES:
            position, name = _RATES[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs = {**kwargs, name: 0.0}
        return func(*args, **kwargs)
