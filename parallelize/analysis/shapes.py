"""What each module is called with and returns, unsharded and planned: shapes alone, on meta tensors.

A plan that fits a model's names can still make its forward do something else. Whether shards meet shows where the planned
forward fails; whether a module sees a part of the data shows in the shapes it is called with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parallelize import _torch_private as private
from parallelize.analysis.attention import fused_on_meta
from parallelize.analysis.records import LOSS
from parallelize.analysis.scopes import Scopes
from parallelize.analysis.tracing import Axes, Tracer
from parallelize.groups import mesh_spec
from parallelize.mesh import MeshSpec
from parallelize.sharded_logits import ShardedLogits
from parallelize.sharding import record_of

T = torch.Tensor
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A module's first call. given, returned: shapes of tensors. inputs: which tensors they are, by identity.

    marked: of what is returned, whether it says itself that it is a shard (logits over the vocabulary).
    """

    given: tuple[Shape, ...]
    inputs: tuple[int, ...]
    returned: tuple[Shape, ...] = ()
    marked: tuple[bool, ...] = ()


@dataclass
class Forward:
    """One forward: calls by module name, and the error that ended it, with the module in which it arose."""

    calls: dict[str, Call] = field(default_factory=dict)
    error: Exception | None = None
    inside: str = ""


def shapes_of(model: nn.Module, inputs: dict[str, Any], spec: MeshSpec | None = None) -> Forward:
    """Run a model on meta (planned, or not) and look at the calls of its modules."""
    record = record_of(model)
    spec = spec or (mesh_spec(record.tp) if record is not None else MeshSpec(dp=1))
    names = {id(module): name for name, module in reversed(list(model.named_modules()))}
    found = Forward()
    stack: list[str] = []
    kept: list[T] = []

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        name = names.get(id(module))
        stack.append(name if name is not None else (stack[-1] if stack else ""))
        if name is not None and name not in found.calls:
            tensors = _tensors((args, kwargs))
            kept.extend(tensors)  # so that an identity stays one tensor's
            found.calls[name] = Call(_shapes(tensors), tuple(map(id, tensors)))

    def leave(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        name = stack.pop()
        call = found.calls.get(name)
        if names.get(id(module)) == name and call is not None and not call.returned:
            out = _tensors(output)
            marked = tuple(isinstance(x, ShardedLogits) for x in out)
            found.calls[name] = Call(call.given, call.inputs, _shapes(out), marked)

    with _hooks(model, enter, leave), fused_on_meta(), Tracer(Scopes(model), lambda _: LOSS, Axes(spec, 0)):
        try:
            model(**{key: value for key, value in inputs.items() if key != "targets"})
        except Exception as error:  # whatever a stock forward raises on shards
            found.error, found.inside = error, stack[-1] if stack else ""
    return found


@contextmanager
def _hooks(model: nn.Module, enter: Any, leave: Any) -> Iterator[None]:
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any) -> list[T]:
    return [leaf for leaf in private.tree_leaves(value) if isinstance(leaf, T)]


def _shapes(tensors: list[T]) -> tuple[Shape, ...]:
    return tuple(tuple(x.shape) for x in tensors)
