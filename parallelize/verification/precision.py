"""True float64: where a stock model computes in float32, both sides of the comparison compute in float64.

Norms, rotary tables and softmaxes of `transformers` round to float32 inside (`x.to(torch.float32)`, `.float()`,
`softmax(dtype=torch.float32)`). With that rounding two correct runs differ by 1e-7, and a mistake of that size passes. The grouped
matmul of experts has no float64, so that each group is a matmul here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize import _torch_private as private

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class InFloat64(TorchFunctionMode):
    """Replaces float32 by float64 in every call that names it, on the thread that enters this mode."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif getattr(func, "__name__", "") in _GROUPED and args[0].dtype is torch.float64:
            func = _grouped_matmul
        if any(arg is torch.float32 for arg in args):
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func is torch.full and isinstance(args[-1], float) and not (kwargs or {}).get("dtype"):
            kwargs = {
                **(kwargs or {}),
                "dtype": torch.float64,
            }  # the smallest number of a dtype is too large for the default one
        return func(*args, **(kwargs or {}))


_GROUPED = ("grouped_mm", "_grouped_mm")


def _grouped_matmul(x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, **_: None) -> torch.Tensor:
    """As `torch.nn.functional.grouped_mm`: rows of x [N, in] up to offs[i] by weights[i], of [groups, in, out]."""
    stops = offs.tolist()
    groups = zip(weights.unbind(0), [0, *stops], stops, strict=False)
    return torch.cat([x[start:stop] @ weight for weight, start, stop in groups])


def widen_recompute(model: nn.Module) -> None:
    """Compute in float64 in forwards that run during backward too, where the surrounding function mode is not active."""
    depth, mode = threading.local(), InFloat64()

    def enter(_: nn.Module, args: tuple) -> None:
        if private.backward_id() != -1:
            depth.value = getattr(depth, "value", 0) + 1
            if depth.value == 1:
                mode.__enter__()

    def leave(_: nn.Module, args: tuple, output: Any) -> None:
        if private.backward_id() != -1:
            depth.value -= 1
            if depth.value == 0:
                mode.__exit__(None, None, None)

    for module in model.modules():
        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Run a model in this dtype. With float64, nothing inside is rounded to float32."""
    if dtype is not torch.float64:
        yield
        return
    with InFloat64():
        yield
