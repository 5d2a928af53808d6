"""Bytes of parameters, gradients and optimizer state that a rank stores, by arithmetic.

With N elements of this rank's tp and pp part, n ranks of the shard axis, b bytes per element in compute, and s bytes of
optimizer state per element (8 for Adam in float32):

| stage | parameters | gradients | optimizer |
|---|---|---|---|
| 0 | b N | b N | s N |
| 1 | b N | b N | s N / n |
| 2 | b N | b N / n | s N / n |
| 3 | b N / n | b N / n | s N / n |

Mixed precision: b is 2 for parameters (4 in stage 3, which stores float32), gradients take 4, and stages 0 to 2 add 4 for
the copies that the optimizer steps. Rows are split as `torch.chunk` splits them, which rounds up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize import _torch_private as private
from parallelize.comm.groups import mesh_spec
from parallelize.layout import even_interval
from parallelize.zero.buckets import matrix_shape, to_local

ADAM_STATE_BYTES = 8


def bytes_per_rank(
    module: nn.Module, zero: int, mesh: DeviceMesh, *, mixed: bool = False, state_bytes: int = ADAM_STATE_BYTES
) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank, of a model that was sharded so.

    Gradient buffers have one more number per parameter, and rounded-up rows.

    Args:
        module: after `shard_data`.
        zero: its stage, 0 to 3.
        mesh: the one that `shard_data` was given.
        mixed: parameters are computed with in bfloat16, and gradients and optimizer state are float32.
        state_bytes: bytes of optimizer state per element.

    Returns: {"parameters", "gradients", "optimizer"}, in bytes.
    Cost: no communication.
    """
    spec = mesh_spec(mesh)
    axis = "dp_shard" if "dp_shard" in spec.names else "dp"
    ranks = spec.size(axis) if axis in spec.names else 1
    rank = mesh.get_local_rank(axis) if axis in spec.names else 0
    totals = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for param in module.parameters():
        count = _count_elements(param, ranks, rank, zero)
        width = 4 if zero == 3 else param.element_size()
        grad_width = 4 if mixed else param.element_size()
        totals["parameters"] += (count.padded if zero == 3 else count.full) * width
        totals["gradients"] += (count.padded if zero >= 2 else count.full + 1) * grad_width
        master_bytes = 4 if mixed and zero < 3 else 0
        totals["optimizer"] += (count.shard if zero >= 1 else count.full) * (state_bytes + master_bytes)
    return totals


class _Elements(NamedTuple):
    """Elements of one parameter: of this rank's tp part, of its ZeRO shard, and of that shard with rows rounded up."""

    full: int
    shard: int
    padded: int


def _count_elements(param: nn.Parameter, ranks: int, rank: int, zero: int) -> _Elements:
    rows, width = matrix_shape(_tp_shape(param) if zero == 3 else to_local(param).shape)
    start, stop = even_interval(rows, ranks, rank)
    return _Elements(rows * width, (stop - start) * width, -(-rows // ranks) * width)


def _tp_shape(param: Any) -> tuple[int, ...]:
    """The shape of this rank's tp part of a parameter that ZeRO 3 shards further."""
    shape = list(param.shape)
    mesh = param.device_mesh
    for axis, placement in enumerate(param.placements):
        dim = private.shard_dim(placement)
        if dim is not None and mesh.ndim > 1 and mesh.mesh_dim_names[axis] == "tp":
            start, stop = even_interval(shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
            shape[dim] = stop - start
    return tuple(shape)
