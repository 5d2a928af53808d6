"""The process groups over which a gradient is sharded, found once for each parameter."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import first_alike

Groups = tuple[dist.ProcessGroup, ...]

_BY_SPEC: dict[int, tuple[weakref.ref[Any], Groups]] = {}
"""By id of a DTensor's spec, which all gradients of a parameter share: comparing placements takes ten times as long."""


def sharding_groups(grad: DTensor) -> Groups:
    """The groups of the axes that shard a gradient."""
    spec = private.spec_of(grad)
    known = _BY_SPEC.get(id(spec))
    if known is not None and known[0]() is spec:
        return known[1]
    mesh = spec.mesh
    groups = tuple(
        first_alike(mesh.get_group(axis))
        for axis, placement in enumerate(spec.placements)
        if private.shard_dim(placement) is not None and mesh.size(axis) > 1
    )
    number = id(spec)
    _BY_SPEC[number] = weakref.ref(spec, lambda _: _BY_SPEC.pop(number, None)), groups
    return groups
