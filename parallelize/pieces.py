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
    """A parameter or buffer as this rank holds it: the local tensor, its full shape, and the (local, full) pieces.

    Attributes:
        axes: of the mesh, along which ranks hold different elements; along all others they hold the same.
        mine: for each piece, whether this rank comes first of those along `axes` that hold these elements (key/value heads
            lie on several).
    """

    fqn: str
    names: tuple[str, ...]
    local: torch.Tensor
    shape: tuple[int, ...]
    pieces: tuple[SlicePair, ...]
    axes: frozenset[str] = frozenset()
    mine: tuple[bool, ...] = (True,)


def stored_parameters(module: nn.Module) -> list[Stored]:
    """Every parameter once, in the model's order."""
    where = Places(module)
    return [where.of(names, parameter) for names, parameter in named_once(module)]


def named_once(module: nn.Module) -> list[tuple[tuple[str, ...], Any]]:
    """(all its names, parameter) of every parameter, in the model's order."""
    names: dict[int, list[str]] = {}
    held: dict[int, Any] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        held[id(parameter)] = parameter
    return [(tuple(called), held[key]) for key, called in names.items()]


class Places:
    """Where the parameters of a model lie, and what is stored in their likeness: float32 copies, an optimiser's moments."""

    def __init__(self, module: nn.Module):
        self.record = record_of(module)
        self.rows = rows_by_name(self.record) if self.record is not None else {}

    def of(self, names: tuple[str, ...], parameter: Any) -> Stored:
        """`parameter`: the model's own of these names, or one that stands for its rows."""
        row = self.rows.get(names[0])
        if not isinstance(parameter, DTensor):
            shape = tuple(parameter.shape)
            return Stored(names[0], names, parameter.detach(), shape, replicated(shape, 1).slices(0))
        if row is None or self.record is None:
            return _of_placements(names, parameter)
        return _of_layout(names, parameter, row.layout, self.record.group.rank)


def _of_layout(names: tuple[str, ...], parameter: DTensor, layout: Layout, rank: int) -> Stored:
    stored = list(layout.stored_shape) if not layout.is_canonical else list(layout.local_shape(rank))
    if layout.dim is not None and not layout.is_canonical:
        stored[layout.dim] = layout.stored_local_size
    mesh = parameter.device_mesh
    tp = (mesh.mesh_dim_names or ("tp",))[0] if mesh.ndim == 1 else "tp"  # a mesh of one axis may call it otherwise
    axes = _axes(parameter) - {tp} | ({tp} if layout.dim is not None else set())
    windows = _windows(parameter, [(0, size) for size in stored], skip="tp")
    found = [
        (inside, first)
        for pair, first in zip(layout.slices(rank), _is_first(layout, rank), strict=True)
        for inside in _inside((pair,), windows)
    ]
    pieces, mine = tuple(pair for pair, _ in found), tuple(first for _, first in found)
    return Stored(names[0], names, private.local_of(parameter).detach(), layout.shape, pieces, frozenset(axes), mine)


def _is_first(layout: Layout, rank: int) -> list[bool]:
    if layout.dim is None:
        return [True]
    return [layout.holders(interval)[0] == rank for interval in layout.owned[rank]]


def _of_placements(names: tuple[str, ...], parameter: DTensor) -> Stored:
    """A DTensor that no plan made: its placements say it all."""
    shape = tuple(parameter.shape)
    windows = _windows(parameter, [(0, size) for size in shape], skip=None)
    pairs: tuple[SlicePair, ...] = ()
    if all(b > a for a, b in windows):
        pairs = (SlicePair(tuple(slice(0, b - a) for a, b in windows), tuple(slice(a, b) for a, b in windows)),)
    local = private.local_of(parameter).detach()
    return Stored(names[0], names, local, shape, pairs, frozenset(_axes(parameter)), (True,) * len(pairs))


def _axes(parameter: DTensor) -> set[str]:
    """The axes over which a DTensor is cut."""
    called = parameter.device_mesh.mesh_dim_names or ("tp",) * parameter.device_mesh.ndim
    return {
        axis for axis, placed in zip(called, parameter.placements, strict=True) if private.shard_dim(placed) is not None
    }


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
