"""Which elements of a parameter lie on this rank: blocks of its stored shard, and where they stand in the full tensor.

Tensor parallelism comes first (a plan's layout: slices, permuted and padded as it says), data axes cut what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize import _torch_private as private
from parallelize.layout import Layout, SlicePair, even_interval, replicated
from parallelize.sharding import record_of, rows_by_name

Interval = tuple[int, int]


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer as this rank holds it: the local tensor, its full shape, and the (local, full) pieces."""

    fqn: str
    names: tuple[str, ...]
    local: torch.Tensor
    shape: tuple[int, ...]
    pieces: tuple[SlicePair, ...]


def stored_parameters(module: nn.Module) -> list[Stored]:
    """Every parameter once, in the model's order."""
    record = record_of(module)
    rows = rows_by_name(record) if record is not None else {}
    names: dict[int, list[str]] = {}
    held: dict[int, Any] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        held[id(parameter)] = parameter
    found = []
    for key, called in names.items():
        row = rows.get(called[0])
        rank = record.group.rank if record is not None else 0
        found.append(_stored(tuple(called), held[key], None if row is None else row.layout, rank))
    return found


def _stored(names: tuple[str, ...], parameter: Any, layout: Layout | None, rank: int) -> Stored:
    if not isinstance(parameter, DTensor):
        shape = tuple(parameter.shape)
        return Stored(names[0], names, parameter.detach(), shape, replicated(shape, 1).slices(0))
    local = private.local_of(parameter).detach()
    if layout is None:
        return _of_placements(names, parameter, local)
    stored = list(layout.stored_shape) if not layout.is_canonical else list(layout.local_shape(rank))
    if layout.dim is not None and not layout.is_canonical:
        stored[layout.dim] = layout.stored_local_size
    windows = _windows(parameter, [(0, size) for size in stored], skip="tp")
    return Stored(names[0], names, local, layout.shape, _inside(layout.slices(rank), windows))


def _of_placements(names: tuple[str, ...], parameter: DTensor, local: torch.Tensor) -> Stored:
    """A DTensor that no plan made: its placements say it all."""
    shape = tuple(parameter.shape)
    windows = _windows(parameter, [(0, size) for size in shape], skip=None)
    pair = SlicePair(tuple(slice(0, b - a) for a, b in windows), tuple(slice(a, b) for a, b in windows))
    return Stored(names[0], names, local, shape, (pair,))


def _windows(parameter: DTensor, windows: list[Interval], skip: str | None) -> list[Interval]:
    """What the mesh axes leave of these intervals, one a dim. `fully_shard` over tp is strided: it cuts last."""
    mesh, axes = parameter.device_mesh, list(enumerate(parameter.placements))
    called = mesh.mesh_dim_names or ()
    axes.sort(key=lambda item: hasattr(item[1], "split_factor"))
    for axis, placement in axes:
        dim = private.shard_dim(placement)
        is_tp = skip is not None and (mesh.ndim == 1 or called[axis] == skip)
        if dim is not None and not is_tp:
            start, stop = windows[dim]
            a, b = even_interval(stop - start, mesh.size(axis), mesh.get_local_rank(axis))
            windows[dim] = (start + a, start + b)
    return windows


def _inside(pairs: tuple[SlicePair, ...], windows: list[Interval]) -> tuple[SlicePair, ...]:
    """The pieces that lie in this window of the stored shard, seen from the window."""
    found = []
    for pair in pairs:
        local, full = [], []
        for here, there, (start, stop) in zip(pair.local, pair.full, windows, strict=True):
            a, b = max(here.start, start), min(here.stop, stop)
            local.append(slice(a - start, max(b, a) - start))
            full.append(slice(there.start + a - here.start, there.start + max(b, a) - here.start))
        if all(part.stop > part.start for part in local) or not local:
            found.append(SlicePair(tuple(local), tuple(full)))
    return tuple(found)


def data_rank(mesh: Any, axes: tuple[str, ...]) -> tuple[int, int]:
    """(place, number) of this rank along the product of these axes of a mesh, those that it has."""
    place, number = 0, 1
    for axis in axes:
        if axis in (mesh.mesh_dim_names or ()):
            size = mesh.size(mesh.mesh_dim_names.index(axis))
            place, number = place * size + mesh.get_local_rank(axis), number * size
    return place, number
