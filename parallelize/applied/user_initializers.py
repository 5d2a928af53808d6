"""Refuses initializers that would draw the same numbers into every shard of a weight.

On the CPU, PyTorch draws the values of a DTensor from each rank's own generator. Ranks that are seeded alike, as tensor
parallelism asks, then store the same numbers in different shards. On other devices DTensors have a generator that knows of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from parallelize.errors import ModelError, Problem


def guard_initializers(module: nn.Module) -> None:
    """Make `reset_parameters` and `_init_weights` of a parallelized model refuse to draw sharded weights on the CPU."""
    for owner in module.modules():
        for name, guard in _GUARDS.items():
            if callable(getattr(type(owner), name, None)) and name not in owner.__dict__:
                owner.__dict__[name] = MethodType(guard, owner)


def is_guard(value: Any) -> bool:
    """Whether the value of a module's attribute is what `guard_initializers` set there."""
    return isinstance(value, MethodType) and value.__func__ in _GUARDS.values()


def _guard(name: str) -> Callable[..., Any]:
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        targets = [value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module)]
        _refuse_shards(name, targets[0]._parameters.values() if targets else self.parameters())
        return getattr(type(self), name)(self, *args, **kwargs)

    return guarded


def _refuse_shards(name: str, parameters: Iterable[torch.Tensor | None]) -> None:
    """Weights of one dim are left out: initializers fill them with constants."""
    sharded = [
        parameter
        for parameter in parameters
        if isinstance(parameter, DTensor)
        and parameter.ndim > 1
        and parameter.device.type == "cpu"
        and any(
            isinstance(placement, Shard) and parameter.device_mesh.size(dim) > 1
            for dim, placement in enumerate(parameter.placements)
        )
    ]
    if sharded:
        what = f"{name} would draw the same numbers into every shard of a weight of shape {list(sharded[0].shape)}"
        fix = "parallelize.initialize(model, seed), which draws one model on any mesh; or initialize before planning"
        raise ModelError(Problem("initializer-on-shards", what, fix=fix))


_GUARDS = {name: _guard(name) for name in ("reset_parameters", "_reset_parameters", "_init_weights")}
