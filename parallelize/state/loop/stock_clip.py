"""`torch.nn.utils.clip_grad_norm_` on any mesh: the norm of the unsharded model.

On a pipeline PyTorch's function sees the gradients of one stage. By its own norm every stage would be scaled by another factor, in
silence. Of tensors of several meshes it has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch

from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.loop.clip import norm_of
from parallelize.state.loop.stock_lists import divide_lists_by_mesh, over_meshes

_STAGED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id, as tensors compare elementwise


def serve_stock_clip(parameters: Iterable[Any]) -> None:
    """Let PyTorch's clipping of any of these parameters take the norm that `clip_grad_norm_` of this package takes.

    Args:
        parameters: of one pipeline stage, marked with it. Every stage must then clip, as it must step.
    """
    serve_several_meshes()
    for parameter in parameters:
        _STAGED[id(parameter)] = parameter


@lru_cache(maxsize=1)
def serve_several_meshes() -> None:
    """Once in a process: let PyTorch's clipping and optimizers take tensors of several meshes."""
    divide_lists_by_mesh()
    private.wrap_in_torch("norm", _wrapped)


def _wrapped(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    norm_of_rank = over_meshes(stock)

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        parameters = _owners(gradients)
        if not parameters:
            return norm_of_rank(gradients, norm_type, error_if_nonfinite, foreach)
        return norm_of(parameters, norm_type, error_if_nonfinite)

    return total_norm


def _owners(gradients: list[torch.Tensor]) -> list[Any]:
    """The parameters with these gradients; none where no gradient is of a pipeline stage."""
    staged = [parameter for reference in _STAGED.valuerefs() if (parameter := reference()) is not None]
    owners = {id(parameter.grad): parameter for parameter in staged if parameter.grad is not None}
    if not any(id(gradient) in owners for gradient in gradients):
        return []
    return [owners[id(gradient)] if id(gradient) in owners else _Unmarked(gradient) for gradient in gradients]


class _Unmarked:
    """A gradient of a parameter that is no stage's."""

    def __init__(self, grad: torch.Tensor):
        self.grad = grad
