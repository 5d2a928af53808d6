"""Moves and casts of a parallelized model, such as `.to()`."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.records import applied, mark_applied

_OF_TO = "Module.to.<locals>.convert"
"""What `.to()` applies to each tensor."""


def guard_moves(module: nn.Module) -> None:
    """Make `.to()`, `.cuda()` and `to_empty()`, of the model, a wrapper or a submodule, release the old storage first."""
    for owner in module.modules():
        if applied(owner).planned is not None or applied(owner).rebuilt_buffers:
            owner.__dict__["_apply"] = MethodType(_apply, owner)


def _apply(self: Any, fn: Callable, recurse: bool = True) -> nn.Module:
    planned = applied(self).planned
    for slot in planned.slots if planned is not None else ():
        slot.forget()
    if _stays(self, fn):
        for child in self.children() if recurse else ():
            child._apply(fn)
    else:
        type(self)._apply(self, fn, recurse)
    for key, value in applied(self).rebuilt_buffers.items():
        buffer = self._buffers.get(key)
        if buffer is not None and not buffer.is_meta:
            self._buffers[key] = _rebuilt(self, key, value).to(device=buffer.device, dtype=buffer.dtype)
    if applied(self).rebuilt_buffers and not _any_meta(self):
        mark_applied(self, rebuilt_buffers={})
    return self


def _stays(module: nn.Module, fn: Callable) -> bool:
    """Whether this is a `.to()` that changes nothing of the module's own tensors. PyTorch would replace DTensors all the same, and
    fails where something refers to one weakly, as what reduces its gradient does."""
    if getattr(fn, "__qualname__", "") != _OF_TO:
        return False
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    tensors = [private.plain_local(tensor).detach() for tensor in [*own, *(x.grad for x in own if x.grad is not None)]]
    return all(fn(tensor) is tensor for tensor in tensors)


def _any_meta(module: nn.Module) -> bool:
    return any(buffer is not None and buffer.is_meta for buffer in module._buffers.values())


def _rebuilt(module: nn.Module, key: str, value: Any) -> Any:
    if value is None:
        raise ModelError(
            Problem(
                "unknown-buffers",
                f"buffer {key} of a {type(module).__name__} is in no checkpoint, and nothing here can rebuild it",
                fix="parallelize.materialize(model, device, rebuild={name: function})",
            )
        )
    return value
