"""True float64: where a stock model computes in float32, both sides of the comparison compute in float64.

Norms, rotary tables and softmaxes of `transformers` round to float32 inside (`x.to(torch.float32)`, `.float()`,
`softmax(dtype=torch.float32)`). With that rounding two correct runs differ by 1e-7, and a mistake of that size passes.
The grouped matmul of experts has no float64, so that each group is a matmul here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from parallelize.axes.recomputation.unit import recompute_units_in
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops.attention.flex_attention import flex_served

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class InFloat64(TorchFunctionMode):
    """Replaces float32 by float64 in every call that names it, or that makes a tensor of numbers without a dtype, on
    the thread that enters this mode."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif getattr(func, "__name__", "") in _GROUPED and args[0].dtype is torch.float64:
            func = _grouped_matmul
        if any(arg is torch.float32 for arg in args):
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        elif _makes_default(getattr(func, "__name__", ""), args, kwargs or {}):
            kwargs = {**(kwargs or {}), "dtype": torch.float64}
        return func(*args, **(kwargs or {}))


_OF_FLOATS = ("zeros", "ones", "empty", "eye", "linspace")
_OF_NUMBERS = ("full", "tensor", "arange", "scalar_tensor")


def _makes_default(name: str, args: tuple, kwargs: dict) -> bool:
    """Whether a call makes a tensor of the default dtype, float32: it names no dtype, and what is given are not whole
    numbers."""
    if kwargs.get("dtype") is not None or torch.get_default_dtype() is not torch.float32:
        return False
    if any(isinstance(arg, torch.dtype) for arg in args) or kwargs.get("out") is not None:
        return False
    leaves = private.tree_leaves((args, kwargs)) if name in _OF_NUMBERS else ()
    has_floats = any(type(leaf) is float for leaf in leaves) and not any(isinstance(x, torch.Tensor) for x in leaves)
    return name in _OF_FLOATS or has_floats


_GROUPED = ("grouped_mm", "_grouped_mm")


def _grouped_matmul(x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, **_: None) -> torch.Tensor:
    """As `torch.nn.functional.grouped_mm`: rows of x [N, in] up to offs[i] by weights[i], of [groups, in, out]."""
    stops = offs.tolist()
    groups = zip(weights.unbind(0), [0, *stops], stops, strict=False)
    return torch.cat([x[start:stop] @ weight for weight, start, stop in groups])


def widen_recompute(model: nn.Module) -> None:
    """Compute in float64 in forwards that run during backward too, where the surrounding function mode is not active.

    A replay of a recomputed unit does not call the unit, but its forward, whose code may compute outside of the modules
    in it.
    """
    depth, mode = threading.local(), InFloat64()

    def enter(*_: Any) -> None:
        if private.backward_id() != -1:
            depth.value = getattr(depth, "value", 0) + 1
            if depth.value == 1:
                mode.__enter__()

    def leave(*_: Any) -> None:
        if private.backward_id() != -1:
            depth.value -= 1
            if depth.value == 0:
                mode.__exit__(None, None, None)

    def replayed(run: Callable, *args: Any) -> Any:
        enter()
        try:
            return run(*args)
        finally:
            leave()

    for module in model.modules():
        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)
    for _, unit in recompute_units_in(model):
        unit.run = partial(replayed, unit.run)  # type: ignore[method-assign]


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Run a model in this dtype. With float64, nothing inside is rounded to float32. `flex_attention` has gradients, as
    in a planned model."""
    with flex_served(), InFloat64() if dtype is torch.float64 else nullcontext():
        yield
