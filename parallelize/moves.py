"""What users do to whole models after planning: moving and casting them, and wrapping them in what cannot hold them."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from parallelize.errors import ModelError, Problem


def guard_moves(module: nn.Module) -> None:
    """Make `.to()`, `.cuda()`, `to_empty()` of the model, of a wrapper or of a part let go of old storage first."""
    for owner in module.modules():
        if "_planned" in owner.__dict__ or "_rebuilt_buffers" in owner.__dict__:
            owner.__dict__["_apply"] = MethodType(_apply, owner)


def _apply(self: Any, fn: Callable, recurse: bool = True) -> nn.Module:
    planned = self.__dict__.get("_planned")
    for slot in planned.slots if planned is not None else ():
        slot.forget()
    type(self)._apply(self, fn, recurse)
    for key, value in self.__dict__.get("_rebuilt_buffers", {}).items():
        buffer = self._buffers.get(key)
        if buffer is not None and not buffer.is_meta:
            self._buffers[key] = _rebuilt(self, key, value).to(device=buffer.device, dtype=buffer.dtype)
    self.__dict__.pop("_rebuilt_buffers", None) if not _any_meta(self) else None
    return self


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


def refuse_ddp(module: nn.Module) -> None:
    """Hide planned parameters from DistributedDataParallel, which then refuses the model.

    Its hooks sit on autograd nodes that planned parameters do not have, so it would reduce nothing, in silence. The name
    is the one that DDP itself documents for parameters that are none of its business.
    """
    module._ddp_params_and_buffers_to_ignore = [name for name, _ in module.named_parameters()]  # type: ignore[assignment]
