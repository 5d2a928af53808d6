"""Tensors whose `.grad` another object keeps: what an optimizer steps in the place of a parameter has the parameter's
gradient.

There is one gradient then. Whoever edits or replaces it, through the model or through the optimizer, edits what the
other reads.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.torch_private import torch_tensors as private

_OWN: Any = torch.Tensor.grad


class Keeper(Protocol):
    """What has the gradient of a tensor."""

    gradient: Any


class KeptGradient:
    """A tensor class whose `.grad` is that of the keeper, where it has one."""

    __slots__ = ()

    @property
    def grad(self) -> Any:
        """The gradient, or None."""
        keeper = _keeper_of(self)
        return _OWN.__get__(self) if keeper is None else keeper.gradient

    @grad.setter
    def grad(self, value: Any) -> None:
        keeper = _keeper_of(self)
        if keeper is None:
            _OWN.__set__(self, value)
        else:
            keeper.gradient = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


def _keeper_of(tensor: Any) -> Keeper | None:
    reference = tensor.__dict__.get("gradient_keeper")
    return None if reference is None else reference()


class SteppedDTensor(KeptGradient, DTensor):
    """A DTensor that an optimizer steps in the place of a parameter."""


class SteppedTensor(KeptGradient, nn.Parameter):
    """A plain tensor that an optimizer steps in the place of a parameter."""


def keep_gradient(tensor: Any, keeper: Keeper) -> None:
    """Let `.grad` of a parameter be that of `keeper`, to which it refers weakly."""
    if not isinstance(tensor, KeptGradient):
        tensor.__class__ = SteppedDTensor if isinstance(tensor, DTensor) else SteppedTensor
    tensor.__dict__["gradient_keeper"] = weakref.ref(keeper)


private.register_foreach_class(SteppedDTensor)
private.register_foreach_class(SteppedTensor)
