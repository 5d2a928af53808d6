"""The tensors of what a forward takes or returns, in whatever containers of the model's author."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch

from parallelize.base.torch_private import torch_tensors as private


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors at any depth, in order: of mappings (outputs of `transformers` are some), sequences, data classes,
    namespaces, and what PyTorch knows how to take apart."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_of_each(value.values())
    elif isinstance(value, (list, tuple)):
        yield from _tensors_of_each(value)
    elif _is_object(value):
        yield from _tensors_of_each(attributes_of(value).values())
    else:
        yield from (leaf for leaf in private.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def floating_in(value: Any) -> Iterator[torch.Tensor]:
    """Those of `tensors_in` with floating-point elements."""
    return (tensor for tensor in tensors_in(value) if tensor.is_floating_point())


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with each of `tensors_in` changed; containers and objects that have some are copied."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if not any(True for _ in tensors_in(value)):
        return value
    if _is_object(value):
        copied = copy.copy(value)
        for name, item in attributes_of(value).items():
            object.__setattr__(copied, name, map_tensors(change, item))  # also of frozen data classes
        return copied
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: map_tensors(change, item) for key, item in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(map_tensors(change, item) for item in value)
    return private.tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def _is_object(value: Any) -> bool:
    """Whether a value has its tensors in attributes."""
    is_mapping = isinstance(value, Mapping)  # as outputs of `transformers` are, which are data classes too
    return isinstance(value, SimpleNamespace) or (
        is_dataclass(value) and not isinstance(value, type) and not is_mapping
    )


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object by name, also of a data class with slots."""
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    names = [field.name for field in fields(value)] if is_dataclass(value) else []
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _tensors_of_each(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        yield from tensors_in(value)
