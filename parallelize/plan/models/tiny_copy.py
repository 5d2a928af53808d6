"""A tiny model of the same class: built from the class and a small config, so that nothing of the live model is read.

The live model may be sharded, on another device, or of other ranks' layers. Its class and config are the same on every
rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import WRAPPER_ASSIGNMENTS
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_MOST_PARAMETERS = 50_000_000
_SEED = 1


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class as its author wrote it: `fully_shard` puts a subclass in its place."""
    classes: tuple[Any, ...] = type(module).__mro__
    return next(cls for cls in classes if not issubclass(cls, FSDPModule))


# -- meta copy -------------------------------------------------------------------------------------------------------
# A copy of a model without values, which shares nothing with it that a forward could change.


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def meta_copy(model: nn.Module) -> nn.Module:
    """The same module on the meta device, with the same ties."""
    copies: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        copies[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    copied = copy.deepcopy(model, copies)
    rebind_functions(copied, copies)
    return copied


def without_hooks(model: nn.Module) -> nn.Module:
    """The same module, whose forward calls none of the user's hooks."""
    for module in model.modules():
        for name in _HOOKS:
            getattr(module, name).clear()
    return model


# -- copied functions ------------------------------------------------------------------------------------------------
# Functions that a copied model has as attributes, and that run modules of the original: `self.mlpf = lambda x:
# m.c_proj(m.c_fc(x))`. Python copies no function, so that such an attribute of a copy would compute with the
# original's weights.


def rebind_functions(model: nn.Module, copies: Mapping[int, Any]) -> None:
    """Make the functions in the attributes of a copied model run its own modules, and compute with its own tensors.

    Args:
        model: the copy. copies: of each original object, by its id; what `copy.deepcopy` filled as its memo.
    """
    rebinding = _Rebinding(copies)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if (own := rebinding.of(value)) is not value:
                module.__dict__[name] = own


class _Rebinding:
    """Values with the copy's objects in the place of the original's; the same objects where they have none of these.

    A function that calls itself by a variable of its closure calls the original there.
    """

    def __init__(self, copies: Mapping[int, Any]):
        self.copies = copies
        # by id, the value, which must not be freed meanwhile, and what it becomes
        self.done: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, (nn.Module, torch.Tensor)):
            return self.copies.get(id(value), value)
        if type(value) not in (FunctionType, dict, list, tuple):
            return value
        if id(value) not in self.done:
            self.done[id(value)] = value, value  # where it contains itself
            self.done[id(value)] = value, self._rebound(value)
        return self.done[id(value)][1]

    def _rebound(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        own = [self.of(item) for item in (value.values() if isinstance(value, dict) else value)]
        if isinstance(value, dict):
            return dict(zip(value, own, strict=True)) if _differ(own, value.values()) else value
        return type(value)(own) if _differ(own, value) else value

    def _function(self, function: FunctionType) -> FunctionType:
        cells = tuple(map(self._cell, function.__closure__ or ()))
        defaults, keywords = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        same = (*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__)
        if not _differ((*cells, defaults, keywords), same):
            return function
        own = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells or None)
        own.__kwdefaults__ = keywords
        for name in WRAPPER_ASSIGNMENTS:
            if hasattr(function, name):
                setattr(own, name, getattr(function, name))
        own.__dict__.update(function.__dict__)
        return own

    def _cell(self, cell: CellType) -> CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            return cell
        own = self.of(content)
        return cell if own is content else CellType(own)


def _differ(first: Iterable[Any], second: Iterable[Any]) -> bool:
    return any(a is not b for a, b in zip(first, second, strict=True))


# -- model dtype -----------------------------------------------------------------------------------------------------
# A model in another dtype.


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in a dtype of real numbers. Complex buffers stay complex: `Module.to` would drop their imaginary
    parts."""
    complex_buffers = [
        (module, key, buffer)
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and buffer.is_complex()
    ]
    for module, key, _ in complex_buffers:
        module._buffers[key] = None
    model.to(dtype)
    for module, key, buffer in complex_buffers:
        module._buffers[key] = buffer.to(torch.promote_types(dtype, torch.complex64))
    return model
