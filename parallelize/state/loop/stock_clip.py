"""`torch.nn.utils.clip_grad_norm_` on any mesh: the norm of the unsharded model.

On a pipeline PyTorch's function sees the gradients of one stage. By its own norm every stage would be scaled by another factor, in
silence. Of tensors of several meshes it has none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.loop.clip import norm_of

_STAGED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id, as tensors compare elementwise


def serve_stock_clip(parameters: Iterable[Any]) -> None:
    """Let PyTorch's clipping of any of these parameters take the norm that `clip_grad_norm_` of this package takes.

    Args:
        parameters: of one pipeline stage, marked with it. Every stage must then clip, as it must step.
    """
    serve_several_meshes()
    for parameter in parameters:
        _STAGED[id(parameter)] = parameter


def serve_several_meshes() -> None:
    """Let PyTorch's clipping and optimizers take tensors of several meshes."""
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


# -- stock lists -----------------------------------------------------------------------------------------------------
# PyTorch's operations on lists of tensors (`foreach`, `fused`, clipping), for a model with tensors of several meshes.
# A plan of some layers leaves plain parameters beside DTensors, and experts are on a mesh of their own. PyTorch
# divides lists by device and dtype before it runs an operation on each, which fails for tensors of several meshes.
# Here lists are divided by mesh too.


def divide_lists_by_mesh() -> None:
    """Let PyTorch run its operations on lists of tensors, of several meshes too."""
    for what in ("optimizers", "averages", "clipping"):
        private.wrap_in_torch(f"lists of {what}", _divided)
    private.wrap_in_torch("total norm", over_meshes)


def over_meshes(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """PyTorch's total norm, also of tensors of several meshes: a plain tensor then."""

    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        parts = _by_mesh(gradients)
        if len(parts) > 1:
            norms = [_plain(stock([gradients[i] for i in part], norm_type, False, foreach)) for part in parts]
            gradients = [norm.to(max((n.dtype for n in norms), key=lambda dtype: dtype.itemsize)) for norm in norms]
        return stock(gradients, norm_type, error_if_nonfinite, foreach)

    return total_norm


def _plain(norm: Any) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _by_mesh(tensors: Sequence[Any]) -> list[list[int]]:
    """The indices of the tensors of each mesh; those of plain tensors are together."""
    parts: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        parts.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(index)
    return list(parts.values())


def _divided(stock: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's division of lists, by mesh too; each list but the first has as many items, or none."""

    def divided(lists: Any, with_indices: bool = False) -> Any:
        parts = _by_mesh(lists[0])
        if len(parts) < 2:
            return stock(lists, with_indices)
        groups = _ListsByMesh()
        for part in parts:
            for key, (own, indices) in stock(
                [[items[i] for i in part] if items else items for items in lists], True
            ).items():
                groups.pairs.append((key, (own, [part[i] for i in indices] if with_indices else [])))
        return groups

    return divided


class _ListsByMesh:
    """As the dictionary that PyTorch returns, with a key for each mesh: (device and dtype, (lists, indices))."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def items(self) -> list[tuple[Any, Any]]:
        """All pairs."""
        return self.pairs

    def values(self) -> Iterator[Any]:
        """(lists, indices) of all pairs."""
        return (value for _, value in self.pairs)
