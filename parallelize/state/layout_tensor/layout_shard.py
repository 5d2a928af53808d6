"""The placement that a `LayoutDTensor` shows: the intervals of a layout.

PyTorch rebuilds a `_StridedShard` from its dim and split factor where it distributes a tensor, so that
`distribute_tensor(full, p.device_mesh, p.placements)` makes shards of its own, which `p.copy_()` and all operations
convert. What computes one offset for each rank from a placement (PyTorch's `DTensor.from_local` after slicing,
`zeros(placements=)`) has no answer here.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from parallelize.base.errors import Problem, ShapeError
from parallelize.base.layout import Interval, Layout, SlicePair, even_interval
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.ops.collectives import gather_dim, pad_to


class LayoutShard(private.StridedShard):
    """Dim `layout.dim` is sharded by the intervals of a layout; a rank may store several of them.

    Args:
        layout: of the full tensor over the ranks of tp.
    """

    def __init__(self, layout: Layout):
        assert layout.dim is not None
        # `distribute_tensor` needs a factor that divides evenly; of 1, PyTorch makes a plain `Shard`
        super().__init__(layout.dim, split_factor=max(2, layout.shape[layout.dim] // layout.num_ranks))
        self.layout = layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayoutShard) and self.layout == other.layout

    def __hash__(self) -> int:
        return hash(self.layout)

    def __repr__(self) -> str:
        return f"LayoutShard(dim={self.dim}, {len(self.layout.chunks)} chunks over {self.layout.num_ranks} ranks)"

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return LayoutShard, (self.layout,)

    def _to_replicate_tensor(
        self, local_tensor: torch.Tensor, mesh: Any, mesh_dim: int, current_logical_shape: Any
    ) -> torch.Tensor:
        """The full tensor in its original order. Called by PyTorch's `redistribute`."""
        layout = self.layout
        if local_tensor.shape[self.dim] != layout.stored_local_size:
            self._refuse()
        full = local_tensor.new_empty(layout.shape)
        for rank, shard in enumerate(Group(mesh.get_group(mesh_dim)).all_gather(local_tensor.contiguous())):
            for pair in layout.slices(rank):
                full[pair.full] = shard[pair.local]
        return full

    def _replicate_to_strided_shard(
        self, local_tensor: torch.Tensor, mesh: Any, mesh_dim: int, shard_index: int
    ) -> torch.Tensor:
        """This rank's shard. Called by PyTorch's `redistribute`."""
        return store(local_tensor, self.layout, int(shard_index))

    def _local_shard_size_and_offset(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    local_shard_size_and_offset: Any = _local_shard_size_and_offset

    def _refuse(self) -> NoReturn:
        """Raises: ShapeError `several-intervals`."""
        what = f"a rank stores several intervals of dim {self.dim} of a {list(self.layout.shape)} parameter, not one"
        raise ShapeError(
            Problem(
                "several-intervals",
                f"{what}: a size and an offset do not describe its shard",
                fix="read it with `full_tensor()`; write it with `copy_`, `load_state_dict`, "
                "torch.distributed.checkpoint or `load_checkpoint`",
            )
        )


# -- local pairs -----------------------------------------------------------------------------------------------------
# Which elements of the full tensor a rank's local tensor stores: tensor parallelism shards first, data axes the
# result.


def local_pairs(tensor: Any, layout: Layout, tp_rank: int) -> list[tuple[SlicePair, bool]]:
    """The (local, full) pairs of slices of a DTensor that is stored by `layout`, in memory order.

    Args:
        tensor: a DTensor over tp (or ep), or over data axes and it.
        tp_rank: the index of this rank in its group of that axis.

    Returns: (pair, whether this rank is the first along tp that stores these elements).
    """
    shape = [(0, size) for size in layout.stored_local_shape(tp_rank)]
    window = local_window(tensor, shape, skip=layout_axis(tensor.device_mesh))
    pairs = zip(layout.slices(tp_rank), _is_first_holder(layout, tp_rank), strict=True)
    inside = ((pair.in_window(window), is_first) for pair, is_first in pairs)
    return [(pair, is_first) for pair, is_first in inside if pair is not None]


def _is_first_holder(layout: Layout, tp_rank: int) -> list[bool]:
    if layout.dim is None:
        return [True]
    return [layout.holders(tp_rank, interval)[0] == tp_rank for interval in layout.owned[tp_rank]]


def layout_axis(mesh: Any) -> int | None:
    """The number of the axis that layouts are over: tp, or ep of a folded mesh. None: the mesh has data axes alone."""
    if mesh.ndim == 1:
        return 0
    names = mesh.mesh_dim_names or ()
    return next((names.index(name) for name in ("tp", "ep") if name in names), None)


def local_window(tensor: Any, window: list[Interval], skip: int | None) -> list[Interval]:
    """The parts of these intervals, one for each dim, that remain after mesh axes other than number `skip` sharded
    them.

    A strided placement (of `fully_shard` over tp) shards last.
    """
    mesh, placements = tensor.device_mesh, list(enumerate(private.spec_of(tensor).placements))
    placements.sort(key=lambda item: hasattr(item[1], "split_factor"))
    for axis, placement in placements:
        dim = private.shard_dim(placement)
        if dim is not None and axis != skip:
            first, last = window[dim]
            start, stop = even_interval(last - first, mesh.size(axis), mesh.get_local_rank(axis))
            window[dim] = (first + start, first + stop)
    return window


# -- stored order ----------------------------------------------------------------------------------------------------
# Full tensors to shards in the order in which a layout stores them, and back.


def layout_group(mesh: Any) -> Group:
    """The process group of the axis that layouts are over: see `layout_axis`."""
    axis = layout_axis(mesh)
    assert axis is not None, f"{mesh} has no axis that layouts are over"
    return Group(mesh.get_group(axis))


def store(full: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """A rank's shard of a full tensor as it is stored: its slices in order, padded where the layout is not
    canonical."""
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
    """The full tensor in its original order, on every rank. A collective over tp (and over the data axes that shard
    it)."""
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
