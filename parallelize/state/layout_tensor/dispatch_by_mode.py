"""torch 2.11 computes operations on subclasses of DTensor as on DTensors, without asking the class: here a mode asks it.

Functions that Python calls with such a tensor reach `__torch_function__`, which runs them under the mode. What autograd calls in
backward does not, so that an operation that would be differentiated is refused. Planned models differentiate local tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private


class _AskTheClass(private.DispatchMode):
    def __init__(self, cls: Any):
        super().__init__()
        self.cls = cls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(type(leaf) is self.cls for leaf in private.tree_leaves((args, kwargs))):
            with private.functions_of_subclasses():
                return self.cls.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **kwargs)


def ask_by_mode(cls: Any) -> None:
    """Let `cls.__torch_dispatch__` see operations on tensors of a subclass of DTensor, on versions that do not call it."""

    def function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with private.no_functions_of_subclasses():
            if func in _READS:
                return func(*args, **(kwargs or {}))
            with _AskTheClass(cls):
                result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, DTensor) and leaf.grad_fn is not None for leaf in private.tree_leaves(result)):
            raise ModelError(_NOT_DIFFERENTIABLE)
        return result

    cls.__torch_function__ = classmethod(function)


_READS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "grad",
        "is_leaf",
        "grad_fn",
        "ndim",
        "data",
        "layout",
        "is_meta",
    )
)
"""Attributes that are no operation, and `data`, whose class is the tensor's own."""

_NOT_DIFFERENTIABLE = Problem(
    "layout-gradient",
    f"an operation on a packed weight is differentiated, which torch {torch.__version__} does in the order of its shards",
    fix="use torch 2.12 or newer; or compute with parameter.full_tensor() or parameter.to_local(), which have gradients",
)
