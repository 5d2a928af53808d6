"""Meta models: parameters come from a checkpoint or an initialiser, but some buffers come from nowhere.

Rotary tables, position ids and embedding scales are not in any checkpoint, and `to_empty` leaves them as garbage. Here
each is rebuilt, or named in an error.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.errors import ModelError, Problem
from parallelize.pieces import named_once
from parallelize.sharding import record_of

Rebuild = Mapping[str, Callable[[], torch.Tensor]]


def guard_buffers(module: nn.Module) -> None:
    """Keep, beside each meta buffer that no checkpoint holds, what it is to become; `to_empty` of the model checks first."""
    module.__dict__["to_empty"] = MethodType(_to_empty, module)
    for _, owner, key, buffer in _unsaved_buffers(module):
        if buffer.is_meta:
            owner.__dict__.setdefault("_rebuilt_buffers", {})[key] = _value_of(module, owner, key, buffer, None)


def _to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
    return materialize(self, device) if recurse else type(self).to_empty(self, device=device, recurse=False)


def materialize(module: nn.Module, device: torch.device | str | int, rebuild: Rebuild | None = None) -> nn.Module:
    """Allocate a meta model on `device`: parameters uninitialised, buffers that no checkpoint holds rebuilt.

    Args:
        rebuild: buffer name to a function that makes it, for those that cannot be rebuilt otherwise.

    Raises: ModelError `unknown-buffers` naming every such buffer, before anything is allocated.
    """
    device = torch.device(device)
    values, lost = {}, []
    for fqn, owner, key, buffer in _unsaved_buffers(module):
        value = _value_of(module, owner, key, buffer, (rebuild or {}).get(fqn))
        if value is None:
            lost.append((fqn, f"{list(buffer.shape)} {buffer.dtype} of {type(owner).__name__}"))
        else:
            values[fqn] = (owner, key, value)
    if lost:
        raise ModelError(
            Problem(
                "unknown-buffers",
                f"{len(lost)} buffers are in no checkpoint, and nothing here can rebuild them",
                rows=tuple(lost),
                fix="parallelize.materialize(model, device, rebuild={name: function}), or make them persistent",
            )
        )
    for owner, key, value in values.values():
        if key in owner.__dict__.get("_rebuilt_buffers", {}):
            owner.__dict__["_rebuilt_buffers"][key] = value
    type(module).to_empty(module, device=device)
    for owner, key, value in values.values():
        owner._buffers[key] = value.to(device)
    return module


def allocate(module: nn.Module, device: torch.device | str | int | None = None, rebuild: Rebuild | None = None) -> None:
    """`materialize`, where anything lies on meta, with ties and buffers that have values as they were.

    device: None: the mesh's device type, or the CPU.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return
    record = record_of(module)
    kept = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}
    tied = [names for names, _ in named_once(module) if len(names) > 1]
    shared: dict[int, list[str]] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        shared.setdefault(id(buffer), []).append(name)
    where = device if device is not None else (record.tp.device_type if record is not None else "cpu")
    materialize(module, where, rebuild)
    for name, buffer in kept.items():
        module.get_buffer(name).copy_(buffer)
    for first, *others in tied:  # `to_empty` of a plain model gives each name a tensor of its own
        for name in others:
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._parameters[key] = module.get_parameter(first)
    for first, *others in shared.values():
        for name in others:
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._buffers[key] = module.get_buffer(first)


def _unsaved_buffers(module: nn.Module):
    for name, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and key in owner._non_persistent_buffers_set:
                yield f"{name}.{key}" if name else key, owner, key, buffer


def _value_of(
    root: nn.Module, owner: nn.Module, key: str, buffer: torch.Tensor, given: Callable[[], torch.Tensor] | None
) -> torch.Tensor | None:
    if given is not None:
        return given()
    if not buffer.is_meta:
        return buffer.clone()
    value = _from_initialiser(root, owner, key)
    return value if value is not None else _from_constructor(owner, key)


def _from_initialiser(root: nn.Module, owner: nn.Module, key: str) -> torch.Tensor | None:
    """What a `transformers` model's `_init_weights` writes into the buffer, tried on a stand-in without weights."""
    initialise = getattr(root, "_init_weights", None)
    if initialise is None:
        return None
    stand_in = copy.copy(owner)
    stand_in.__dict__ = dict(owner.__dict__)
    stand_in.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(torch.empty(p.shape, device="meta", dtype=p.dtype))
        for name, p in owner._parameters.items()
    }
    blank = {name: _blank(b) for name, b in owner._buffers.items() if b is not None}
    stand_in.__dict__["_buffers"] = {name: b.clone() for name, b in blank.items()}
    try:
        with torch.no_grad():
            initialise(stand_in)
    except Exception:  # a foreign initialiser may want what a stand-in lacks; the caller tries the next way
        return None
    value: Any = stand_in._buffers[key]
    return None if _same(value, blank[key]) else value


def _blank(buffer: torch.Tensor) -> torch.Tensor:
    """A value that no initialiser writes."""
    if buffer.is_floating_point():
        return torch.full(buffer.shape, torch.nan, dtype=buffer.dtype)
    return torch.full(
        buffer.shape, 1 if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min, dtype=buffer.dtype
    )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _from_constructor(owner: nn.Module, key: str) -> torch.Tensor | None:
    """The buffer of a fresh module of the same class, where the class needs nothing but a config that the module keeps."""
    config = getattr(owner, "config", None)
    if config is None or any(True for _ in owner.parameters()):
        return None
    try:
        inspect.signature(type(owner)).bind(config)
        with torch.device("cpu"):
            fresh = type(owner)(config)
    except Exception:  # not constructible from its config alone
        return None
    value, wanted = fresh._buffers.get(key), owner._buffers[key]
    same = value is not None and wanted is not None and value.shape == wanted.shape and not value.is_meta
    return value if same else None
