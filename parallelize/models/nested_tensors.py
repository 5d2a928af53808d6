"""The tensors of what a forward takes or returns, in whatever containers of the model's author."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import torch

from parallelize.torch_private import torch_tensors as private


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors at any depth, in order: of mappings (outputs of `transformers` are some), sequences, data classes, namespaces, and what
    PyTorch knows how to take apart."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _of_each(value.values())
    elif isinstance(value, (list, tuple)):
        yield from _of_each(value)
    elif isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
        yield from _of_each(vars(value).values())
    else:
        yield from (leaf for leaf in private.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def floating_in(value: Any) -> Iterator[torch.Tensor]:
    """Those of `tensors_in` with floating-point elements."""
    return (tensor for tensor in tensors_in(value) if tensor.is_floating_point())


def _of_each(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        yield from tensors_in(value)
