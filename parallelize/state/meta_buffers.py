"""Buffers of meta models. Parameters come from a checkpoint or an initializer, but some buffers come from neither.

Rotary tables, position ids and embedding scales are in no checkpoint, and `to_empty` leaves them uninitialized. Here
each one is rebuilt, or named in an error.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.model_facts import named_once
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.state.records import applied, mark_applied, record_of
from parallelize.state.tensor_tables import swappable

Rebuild = Mapping[str, Callable[[], torch.Tensor]]


def guard_buffers(module: nn.Module) -> None:
    """Record the value of each meta buffer that no checkpoint stores, and make `to_empty` of the model rebuild them
    first."""
    module.__dict__["to_empty"] = MethodType(_to_empty, module)
    for _, owner, key, buffer in _unsaved_buffers(module):
        if buffer.is_meta:
            _record_value(owner, key, _value_of(module, owner, key, buffer, None))


def _record_value(owner: nn.Module, key: str, value: torch.Tensor | None) -> None:
    mark_applied(owner, rebuilt_buffers={**applied(owner).rebuilt_buffers, key: value})


def _to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
    return materialize(self, device) if recurse else type(self).to_empty(self, device=device, recurse=False)


def materialize(module: AnyModel, device: torch.device | str | int, rebuild: Rebuild | None = None) -> nn.Module:
    """Allocate a meta model in place: parameters are uninitialized, buffers that no checkpoint stores are rebuilt.

    Args:
        module: parallelized or not. Buffers that already have values keep them.
        device: where to allocate.
        rebuild: buffer name -> function that returns its value, for buffers that cannot be rebuilt otherwise: from the
            config, or from what `build_on_meta` has recorded of their making.

    Returns: the same module.
    Raises: ModelError `unknown-buffers`, which names every buffer without a value, before anything is allocated.
    Cost: no communication.
    """
    module = module_of(module)
    device = torch.device(device)
    values, unknown = {}, []
    for fqn, owner, key, buffer in _unsaved_buffers(module):
        value = _value_of(module, owner, key, buffer, (rebuild or {}).get(fqn))
        if value is None:
            unknown.append((fqn, f"{list(buffer.shape)} {buffer.dtype} of {type(owner).__name__}"))
        else:
            values[fqn] = (owner, key, value)
    recipe: Any = applied(module).recipe
    recorded = recipe.constants([fqn for fqn, _ in unknown]) if unknown and recipe is not None else {}
    for fqn, value in recorded.items():
        owner, _, key = fqn.rpartition(".")
        values[fqn] = (module.get_submodule(owner), key, value)
    unknown = [row for row in unknown if row[0] not in recorded]
    if unknown:
        raise ModelError(
            Problem(
                "unknown-buffers",
                f"{len(unknown)} buffers are in no checkpoint, and nothing here can rebuild them",
                rows=tuple(unknown),
                fix="parallelize.materialize(model, device, rebuild={name: function}), or make them persistent",
            )
        )
    for owner, key, value in values.values():
        if key in applied(owner).rebuilt_buffers:
            _record_value(owner, key, value)
    type(module).to_empty(module, device=device)
    for owner, key, value in values.values():
        owner._buffers[key] = value.to(device)
    return module


def allocate(module: nn.Module, device: torch.device | str | int | None = None, rebuild: Rebuild | None = None) -> None:
    """`materialize` a model if any of it is on meta; ties, and buffers that have values, are preserved.

    Args:
        device: None: the device type of the mesh, or the CPU.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return
    record = record_of(module)
    with_values = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}
    tied_parameters = [names for names, _ in named_once(module) if len(names) > 1]
    buffer_names: dict[int, list[str]] = {}
    for name, buffer in module.named_buffers(remove_duplicate=False):
        buffer_names.setdefault(id(buffer), []).append(name)
    if device is None:
        device = record.tp.device_type if record is not None else "cpu"
    materialize(module, device, rebuild)
    for name, buffer in with_values.items():
        module.get_buffer(name).copy_(buffer)
    for first, *aliases in tied_parameters:  # `to_empty` of a plain model allocates one tensor for each name
        for name in aliases:
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._parameters[key] = module.get_parameter(first)
    for first, *aliases in buffer_names.values():
        for name in aliases:
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._buffers[key] = module.get_buffer(first)


def _unsaved_buffers(module: nn.Module):
    for name, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and key in owner._non_persistent_buffers_set:
                yield f"{name}.{key}" if name else key, owner, key, buffer


def _value_of(
    root: nn.Module, owner: nn.Module, key: str, buffer: torch.Tensor, make: Callable[[], torch.Tensor] | None
) -> torch.Tensor | None:
    if make is not None:
        return make()
    if not buffer.is_meta:
        return buffer.clone()
    value = _buffer_from_initializer(root, owner, key)
    return value if value is not None else _buffer_from_constructor(owner, key)


def _buffer_from_initializer(root: nn.Module, owner: nn.Module, key: str) -> torch.Tensor | None:
    """The value that `_init_weights` of a `transformers` model writes into the buffer of a stand-in without weights."""
    initialize = getattr(root, "_init_weights", None)
    if initialize is None:
        return None
    stand_in = copy.copy(owner)
    stand_in.__dict__ = dict(owner.__dict__)
    stand_in.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(torch.empty(p.shape, device="meta", dtype=p.dtype))
        for name, p in owner._parameters.items()
    }
    unwritten = {name: _unwritten_value(b) for name, b in owner._buffers.items() if b is not None}
    stand_in.__dict__["_buffers"] = {name: b.clone() for name, b in unwritten.items()}
    try:
        with torch.no_grad():
            initialize(stand_in)
    except Exception:  # a foreign initializer may fail in any manner on a stand-in; the constructor is tried next
        return None
    value: Any = stand_in._buffers[key]
    return None if _equal_with_nans(value, unwritten[key]) else value


def _unwritten_value(buffer: torch.Tensor) -> torch.Tensor:
    """A value that no initializer writes."""
    if buffer.is_floating_point():
        return torch.full(buffer.shape, torch.nan, dtype=buffer.dtype)
    return torch.full(
        buffer.shape, 1 if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min, dtype=buffer.dtype
    )


def _equal_with_nans(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _buffer_from_constructor(owner: nn.Module, key: str) -> torch.Tensor | None:
    """The buffer of a new module of the same class, if the class is constructed from the module's `config` alone."""
    config = getattr(owner, "config", None)
    if config is None or any(True for _ in owner.parameters()):
        return None
    try:
        inspect.signature(type(owner)).bind(config)
        with torch.device("cpu"):
            rebuilt = type(owner)(config)
    except Exception:  # a foreign constructor may fail in any manner: not constructible from its config alone
        return None
    value, meta_buffer = rebuilt._buffers.get(key), owner._buffers[key]
    if value is None or meta_buffer is None or value.is_meta or value.shape != meta_buffer.shape:
        return None
    return value


# -- module moves ----------------------------------------------------------------------------------------------------
# Moves and casts of a parallelized model, such as `.to()`.


_CASTS = ("float", "double", "half", "bfloat16", "cpu", "cuda")
_CONVERSIONS = {"Module.to.<locals>.convert", *(f"Module.{name}.<locals>.<lambda>" for name in _CASTS)}
"""What `.to()`, and methods that are short for it, apply to each tensor."""


def guard_moves(module: nn.Module) -> None:
    """Make `.to()`, `.cuda()` and `to_empty()`, of the model, a wrapper or a submodule, release the old storage
    first."""
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
        with swappable(self.parameters(recurse)):
            type(self)._apply(self, fn, recurse)
    for key, value in applied(self).rebuilt_buffers.items():
        buffer = self._buffers.get(key)
        if buffer is not None and not buffer.is_meta:
            self._buffers[key] = _rebuilt(self, key, value).to(device=buffer.device, dtype=buffer.dtype)
    if applied(self).rebuilt_buffers and not _any_meta(self):
        mark_applied(self, rebuilt_buffers={})
    return self


def _stays(module: nn.Module, fn: Callable) -> bool:
    """Whether this is a `.to()` or a cast that changes nothing of the module's own tensors. PyTorch would replace
    DTensors all the same, and fails where something refers to one weakly, as what reduces its gradient does."""
    if getattr(fn, "__qualname__", "") not in _CONVERSIONS:
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
