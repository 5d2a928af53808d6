"""Refuses to read one rank's part of a number, such as `parameter.grad.norm().item()`, as if it were the number.

A reduction of a sharded DTensor gives each rank its part, and `.item()`, `float()` and `bool()` return that part: a decision
taken on it differs by rank. The other ranks may not call it, so that reducing it there could wait for ever.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private


@cache
def guard_partial_values() -> None:
    """Let `.item()` of a DTensor raise ModelError `partial-value` where ranks have parts of it, from the first call on."""
    private.dtensor_handlers.setdefault(torch.ops.aten._local_scalar_dense.default, _item)


def _item(op: Any, args: tuple, kwargs: dict) -> Any:
    value: DTensor = args[0]
    mesh = value.device_mesh
    parts = [dim for dim, placement in enumerate(value.placements) if placement.is_partial() and mesh.size(dim) > 1]
    if parts:
        axes = ", ".join(_axis(mesh, dim) for dim in parts)
        what = f"a number is read of which each rank of {axes} has its part, {private.local_of(value).item()} here"
        fix = (
            "value.full_tensor().item(), a collective, on every rank; of gradients: clip_grad_norm_ and full_gradients"
        )
        raise ModelError(Problem("partial-value", what, fix=fix))
    return op(private.local_of(value))


def _axis(mesh: Any, dim: int) -> str:
    return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"mesh dim {dim}"
