"""How many bytes of parameters, gradients and optimiser state a rank holds, by arithmetic.

With N elements of this rank's tp and pp part, n data ranks of the shard axis, b bytes of an element as computed with, and s
bytes of state an element (8 for Adam in float32):

| stage | parameters | gradients | optimiser |
|---|---|---|---|
| 0 | b N | b N | s N |
| 1 | b N | b N | s N / n |
| 2 | b N | b N / n | s N / n |
| 3 | b N / n | b N / n | s N / n |

Mixed precision: b is 2 for parameters (4 in stage 3, which stores float32), gradients take 4, and stages 0 to 2 add 4 for
the copies that the optimiser steps. Rows are cut as `torch.chunk` cuts, which rounds up.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize import _torch_private as private
from parallelize.groups import mesh_spec
from parallelize.layout import even_interval
from parallelize.zero.buckets import local, rows_of

ADAM_STATE_BYTES = 8


def bytes_per_rank(
    module: nn.Module, zero: int, mesh: DeviceMesh, *, mixed: bool = False, state_bytes: int = ADAM_STATE_BYTES
) -> dict[str, int]:
    """{"parameters", "gradients", "optimizer"} bytes on this rank of a model that was sharded so.

    Buffers of gradients hold one number more a parameter, and rows rounded up.
    """
    spec = mesh_spec(mesh)
    axis = "dp_shard" if "dp_shard" in spec.names else "dp"
    ranks = spec.size(axis) if axis in spec.names else 1
    rank = mesh.get_local_rank(axis) if axis in spec.names else 0
    found = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for param in module.parameters():
        whole, own, padded = _counts(param, ranks, rank, zero)
        width = 4 if zero == 3 else param.element_size()
        grad = 4 if mixed else param.element_size()
        kept = own if zero >= 1 else whole
        found["parameters"] += (padded if zero == 3 else whole) * width
        found["gradients"] += {0: (whole + 1) * grad, 1: (whole + 1) * grad, 2: padded * grad, 3: padded * grad}[zero]
        found["optimizer"] += kept * (state_bytes + (4 if mixed and zero < 3 else 0))
    return found


def _counts(param: nn.Parameter, ranks: int, rank: int, zero: int) -> tuple[int, int, int]:
    """(elements of this rank's tp part, own rows of it, own rows rounded up)."""
    rows, width = rows_of(_tp_shape(param) if zero == 3 else local(param).shape)
    start, stop = even_interval(rows, ranks, rank)
    return rows * width, (stop - start) * width, -(-rows // ranks) * width


def _tp_shape(param: Any) -> tuple[int, ...]:
    """The shape of this rank's tp part of a parameter that ZeRO 3 has cut further."""
    shape = list(param.shape)
    mesh = param.device_mesh
    for axis, placement in enumerate(param.placements):
        dim = private.shard_dim(placement)
        if dim is not None and mesh.ndim > 1 and mesh.mesh_dim_names[axis] == "tp":
            start, stop = even_interval(shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
            shape[dim] = stop - start
    return tuple(shape)
