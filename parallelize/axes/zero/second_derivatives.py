"""Second derivatives by a model's inputs under ZeRO 3 (gradient penalties) are refused by name.

`fully_shard` frees the gathered parameters at the end of the first backward; the second one would read them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private


def refuse_second_derivatives(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook. A derivative by an input is refused where it is differentiated again; by itself it is right.

    Raises: ModelError `double-backward`, in the second backward, before a parameter is read.
    """
    if torch.is_grad_enabled():
        return private.tree_map(_watched, args), private.tree_map(_watched, kwargs)
    return None


def _watched(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    view = value.view_as(value)
    view.register_hook(_unless_differentiated)
    return view


def _unless_differentiated(grad: torch.Tensor) -> torch.Tensor:
    return _Once.apply(grad) if torch.is_grad_enabled() and grad.requires_grad else grad


class _Once(torch.autograd.Function):
    """The identity, without a derivative."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        what = "a derivative by the model's input is differentiated again, and ZeRO 3 has freed the parameters that it needs"
        raise ModelError(Problem("double-backward", what, fix="zero=2, whose ranks have all parameters"))
