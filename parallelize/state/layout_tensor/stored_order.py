"""Full tensors to shards in the order in which a layout stores them, and back."""

from __future__ import annotations

from typing import Any

import torch

from parallelize.base.layout import Layout, even_interval
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.ops.collectives import gather_dim, pad_to
from parallelize.state.layout_tensor.local_pairs import layout_axis


def layout_group(mesh: Any) -> Group:
    """The process group of the axis that layouts are over: see `layout_axis`."""
    axis = layout_axis(mesh)
    assert axis is not None, f"{mesh} has no axis that layouts are over"
    return Group(mesh.get_group(axis))


def store(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """A rank's shard of a full tensor as it is stored: its slices in order, padded where the layout is not canonical."""
    if layout.dim is None:
        return full.clone(memory_format=torch.contiguous_format)
    parts = [full[pair.full] for pair in layout.slices(rank)]
    if not parts:
        parts = [full.narrow(layout.dim, 0, 0)]
    if len(parts) == 1:
        local = parts[0].clone(memory_format=torch.contiguous_format)
    else:
        local = torch.cat(parts, layout.dim).contiguous()
    if layout.is_canonical or local.shape[layout.dim] == layout.stored_local_size:
        return local
    return pad_to(local, layout.dim, layout.stored_local_size)


def store_like(full: torch.Tensor, layout: Layout, tensor: Any) -> torch.Tensor:
    """A full tensor as the local tensor of a DTensor that is stored like `tensor`, also where data axes shard it.

    No communication: `full` is on every rank.
    """
    mesh, layout_number = tensor.device_mesh, layout_axis(tensor.device_mesh)
    local = store(full, layout, layout_group(mesh).rank)
    for axis, placement in enumerate(private.spec_of(tensor).placements):
        dim = private.shard_dim(placement)
        if axis != layout_number and dim is not None:
            start, stop = even_interval(local.shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
            local = local.narrow(dim, start, stop - start).contiguous()
    return local


def unshard(stored: Any, layout: Layout, group: Group) -> torch.Tensor:
    """The full tensor in its original order, on every rank. A collective over tp (and over the data axes that shard it)."""
    local = _without_data_axes(stored, layout, group)
    if layout.dim is None:
        return local.clone()
    if group.size == 1:
        shards = [local]
    else:
        largest = layout.stored_local_size  # of a canonical layout too: all_gather takes equal shapes
        padded = local if local.shape[layout.dim] == largest else pad_to(local, layout.dim, largest)
        shards = list(group.all_gather(padded.contiguous()))
    full = local.new_empty(layout.shape)
    for rank, shard in enumerate(shards):
        for pair in layout.slices(rank):
            full[pair.full] = shard[pair.local]
    return full


def _without_data_axes(stored: Any, layout: Layout, group: Group) -> torch.Tensor:
    """The tp shard of a DTensor that data axes may have sharded further."""
    local = private.local_of(stored).detach()
    mesh, layout_number = stored.device_mesh, layout_axis(stored.device_mesh)
    for axis, placement in reversed(list(enumerate(private.spec_of(stored).placements))):
        dim = private.shard_dim(placement)
        if axis != layout_number and dim is not None:
            data = Group(mesh.get_group(axis))
            size = layout.stored_local_shape(group.rank)[dim]
            local = gather_dim(pad_to(local, dim, -(-size // data.size)).contiguous(), data, dim, size)
    return local
