"""Refuses gradients with respect to planned parameters, which PyTorch would leave out.

A planned module computes with plain leaves, whose gradients a hook moves to the DTensors. `backward(inputs=...)` runs no such hook,
and `torch.autograd.grad(..., allow_unused=True)` returns None: neither says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.records import mark_of


def refuse_gradient_inputs() -> None:
    """Calls without `inputs` and calls on other tensors run as they are."""
    private.wrap_in_torch("backward", _backward)
    private.wrap_in_torch("grad", _grad)


def _backward(stock: Callable[..., None]) -> Callable[..., None]:
    def backward(*args: Any, **kwargs: Any) -> None:
        inputs = kwargs.get("inputs", args[5] if len(args) > 5 else None)
        if inputs is None:
            return stock(*args, **kwargs)
        planned = [(x, _gradient_of(x)) for x in _tensors(inputs) if mark_of(x).own]
        stock(*args, **kwargs)
        if any(_gradient_of(x) == before for x, before in planned):
            raise _refusal("backward(inputs=...)")
        return None

    return backward


def _grad(stock: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        gradients = stock(outputs, inputs, *args, **kwargs)
        if any(gradient is None and mark_of(x).own for x, gradient in zip(_tensors(inputs), gradients, strict=False)):
            raise _refusal("torch.autograd.grad")
        return gradients

    return grad


def _tensors(inputs: Any) -> list[Any]:
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    return list(inputs) if isinstance(inputs, Iterable) else [inputs]


def _gradient_of(parameter: Any) -> tuple[int, int]:
    """Which gradient a parameter has, and how often it was written to."""
    gradient = getattr(parameter, "grad", None)
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def _refusal(call: str) -> ModelError:
    what = f"{call} does not reach the parameters of planned modules, which compute with local tensors"
    return ModelError(Problem("gradient-inputs", what, fix="loss.backward(), and read the parameters' .grad"))
