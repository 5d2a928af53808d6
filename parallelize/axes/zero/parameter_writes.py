"""Forwards that write to parameters, under ZeRO 3: what they write goes to the copy that is gathered for that forward.

Backward gathers the stored shards again, so that its gradients would be those of other values than the forward's, without an
error. Which parameters a class may write to is read from its source (`self.linear.weight.data.clamp_(...)`); after a forward of the
unit that has them they are compared with what they were before it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from parallelize.axes.zero.buckets import to_local
from parallelize.base.errors import ModelError, Problem

_WRITE = re.compile(r"\bself\.([A-Za-z_][\w.]*?)\.data\.[a-z]\w*_\(")
_ONCE = re.compile(r"init|reset")  # methods that run before training


def refuse_writes(units: Mapping[str, nn.Module], module: nn.Module) -> None:
    """Compare the parameters that forwards may write to, around each forward of their unit.

    Args:
        units: that `fully_shard` was applied to, by name; "" is the model.
    """
    of_units: dict[str, list[tuple[nn.Module, str, str]]] = {}
    for name, owner in module.named_modules():
        kind: Any = type(owner)
        for path in _written_by(kind):
            place, _, key = path.rpartition(".")
            holder = _inner(owner, place)
            if holder is not None and key in holder._parameters:
                inside = [unit for unit in units if not unit or f"{name}.".startswith(f"{unit}.")]
                full = ".".join(filter(None, (name, path)))
                of_units.setdefault(max(inside, key=len), []).append((holder, key, full))
    for unit, parameters in of_units.items():
        comparison = _Comparison(parameters)
        units[unit].register_forward_pre_hook(comparison.before)  # after that of `fully_shard`, which gathers
        units[unit].register_forward_hook(comparison.after, prepend=True)  # before that of `fully_shard`, which frees


class _Comparison:
    """parameters: (module, key, full name)."""

    def __init__(self, parameters: list[tuple[nn.Module, str, str]]):
        self.parameters = parameters
        self.values: list[torch.Tensor] = []

    def before(self, *_: Any) -> None:
        self.values = [to_local(holder._parameters[key]).detach().clone() for holder, key, _ in self.parameters]

    def after(self, *_: Any) -> None:
        values, self.values = self.values, []
        for (holder, key, name), value in zip(self.parameters, values, strict=False):
            now = to_local(holder._parameters[key]).detach()
            if now.shape != value.shape or torch.equal(now, value):  # of another shape where it is not gathered now
                continue
            what = f"the forward writes to {name}, of which ZeRO 3 has gathered a copy: backward would compute with other values"
            raise ModelError(Problem("written-parameter", what, fix="zero=2, or write to it between steps"))


@cache
def _written_by(cls: type) -> tuple[str, ...]:
    """The parameters that methods of a class write to, as paths from `self`."""
    return tuple(dict.fromkeys(path for method in _methods(cls) for path in _WRITE.findall(method)))


def _methods(cls: type) -> Iterator[str]:
    for kind in cls.__mro__:
        if kind is nn.Module or not issubclass(kind, nn.Module) or kind.__module__.startswith("torch."):
            continue
        for name, function in vars(kind).items():
            if inspect.isfunction(function) and not _ONCE.search(name):
                try:
                    yield inspect.getsource(function)
                except OSError:  # it has no source
                    continue


def _inner(module: nn.Module, path: str) -> nn.Module | None:
    for name in filter(None, path.split(".")):
        inner = getattr(module, name, None)
        if not isinstance(inner, nn.Module):
            return None
        module = inner
    return module
