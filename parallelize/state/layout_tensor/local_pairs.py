"""Which elements of the full tensor a rank's local tensor stores: tensor parallelism shards first, data axes the result."""

from __future__ import annotations

from typing import Any

from parallelize.base.layout import Interval, Layout, SlicePair, even_interval, part_inside
from parallelize.base.torch_private import torch_tensors as private


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
    inside = ((part_inside(pair, window), is_first) for pair, is_first in pairs)
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
    """The parts of these intervals, one for each dim, that remain after mesh axes other than number `skip` sharded them.

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
