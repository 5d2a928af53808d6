"""The elements of a parameter that this rank stores: slices of its local tensor, paired with slices of the full tensor.

Tensor parallelism shards first, as the plan's layout says: chunks, permuted and padded. Data axes shard the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.boxes import box_of, volume
from parallelize.base.layout import Layout, SlicePair, replicated
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.model_facts import named_once
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.state.layout_tensor.layout_shard import layout_axis, local_pairs, local_window
from parallelize.state.records import pipeline_cut, record_of
from parallelize.state.sharding import rows_by_name


@dataclass(frozen=True)
class StoredTensor:
    """A parameter or buffer as this rank stores it.

    Attributes:
        fqn, names: its first name, and all of its names.
        local: the local tensor.
        shape: the shape of the full tensor.
        slices: the (local, full) pairs of slices that this rank stores.
        axes: the mesh axes along which ranks store different elements. Along all others they store the same.
        is_first_holder: for each pair of `slices`, whether this rank is the first of those along `axes` that store
            these elements (several ranks may store a key/value head).
    """

    fqn: str
    names: tuple[str, ...]
    local: torch.Tensor
    shape: tuple[int, ...]
    slices: tuple[SlicePair, ...]
    axes: frozenset[str] = frozenset()
    is_first_holder: tuple[bool, ...] = (True,)


def copy_into(stored: StoredTensor, full: torch.Tensor, local: torch.Tensor) -> None:
    """Copy this rank's elements of a full tensor. local: what gets them, of the shape of `stored.local`."""
    for pair in stored.slices:
        local[pair.local] = full[pair.full].to(device=local.device, dtype=local.dtype)


def clear_padding(stored: StoredTensor, local: torch.Tensor) -> None:
    """Zero a tensor of the shape of `stored.local`, if it has elements outside of the slices."""
    if sum(volume(box_of(pair.local)) for pair in stored.slices) < local.numel():
        local.zero_()


def stored_parameters(module: nn.Module) -> list[StoredTensor]:
    """Every parameter once, in the order of the model."""
    stored_slices = StoredSlices(module)
    return [stored_slices.of(names, parameter) for names, parameter in named_once(module)]


class StoredSlices:
    """The stored slices of a model's parameters, and of tensors stored like them: float32 copies, optimizer states."""

    def __init__(self, module: nn.Module):
        self.record = record_of(module)
        self.rows = rows_by_name(self.record) if self.record is not None else {}
        self._alike: dict[Any, _Alike] = {}

    def of(self, names: tuple[str, ...], parameter: Any) -> StoredTensor:
        """`parameter`: the model's parameter of these names, or a tensor that is stored like it."""
        row = self.rows.get(names[0])
        if not isinstance(parameter, DTensor):
            shape = tuple(parameter.shape)
            return StoredTensor(names[0], names, parameter.detach(), shape, replicated(shape, 1).slices(0))
        if row is None or self.record is None:
            return _stored_by_placements(names, parameter)
        local = private.local_of(parameter).detach()
        layout, rank = row.layout, self.record.group_for(row).rank
        key = layout, rank, parameter.device_mesh, private.spec_of(parameter).placements
        if key not in self._alike:
            self._alike[key] = _alike(parameter, layout, rank)
        return StoredTensor(names[0], names, local, layout.shape, *self._alike[key])


_Alike = tuple[tuple[SlicePair, ...], frozenset[str], tuple[bool, ...]]
"""`slices`, `axes` and `is_first_holder`, which tensors that are laid out alike share."""


def _alike(parameter: DTensor, layout: Layout, rank: int) -> _Alike:
    mesh = parameter.device_mesh
    number = layout_axis(mesh)
    over = set() if number is None else {(mesh.mesh_dim_names or ("tp",))[number]}
    axes = _sharding_axes(parameter) - over | (over if layout.dim is not None else set())
    pairs = local_pairs(parameter, layout, rank)
    slices, is_first_holder = tuple(pair for pair, _ in pairs), tuple(is_first for _, is_first in pairs)
    return slices, frozenset(axes), is_first_holder


def _stored_by_placements(names: tuple[str, ...], parameter: DTensor) -> StoredTensor:
    """A DTensor that no plan made, such as one of `fully_shard`."""
    shape = tuple(parameter.shape)
    window = local_window(parameter, [(0, size) for size in shape], skip=None)
    pairs: tuple[SlicePair, ...] = ()
    if all(stop > start for start, stop in window):
        local_slices = tuple(slice(0, stop - start) for start, stop in window)
        pairs = (SlicePair(local_slices, tuple(slice(start, stop) for start, stop in window)),)
    local, axes = private.local_of(parameter).detach(), frozenset(_sharding_axes(parameter))
    return StoredTensor(names[0], names, local, shape, pairs, axes, (True,) * len(pairs))


def _sharding_axes(parameter: DTensor) -> set[str]:
    """The mesh axes that shard a DTensor."""
    axes = parameter.device_mesh.mesh_dim_names or ("tp",) * parameter.device_mesh.ndim
    placements = zip(axes, parameter.placements, strict=True)
    return {axis for axis, placement in placements if private.shard_dim(placement) is not None}


# -- tied names ------------------------------------------------------------------------------------------------------
# Which parameters of a model are one.


def tied_names(module: AnyModel) -> tuple[tuple[str, ...], ...]:
    """The names of each tied parameter of a model: shared by modules, or copied to several pipeline stages.

    Args:
        module: any model, parallelized or not. After `cut_pipeline` these are the ties of the full model, as every rank
            has them, though it stores only the copies of its own stages (`shard_info` says which ranks store which). A
            tie that was broken by an assignment after the plan is still listed; the first forward refuses it.

    Returns: for each parameter with several names, all of them, the first one first. Those of the plan's `ties:` are
        listed too.
    Cost: no communication.
    """
    module = module_of(module)
    cut, record = pipeline_cut(module), record_of(module)
    resolved = cut.resolved if cut is not None else record.resolved if record is not None else None
    groups: list[tuple[str, ...]] = []
    if resolved is not None:
        groups += [fact.names for fact in resolved.facts.parameters.values()]
        groups += [tie.members for tie in resolved.ties]
    if cut is None:  # also what was tied since, or is in no plan
        groups += [names for names, _ in named_once(module)]
    return tuple(names for names in _joined(groups) if len(names) > 1)


def _joined(groups: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Groups that have a name in common as one, in the order of the names' first group."""
    order = list(dict.fromkeys(name for group in groups for name in group))
    joined: dict[str, set[str]] = {name: {name} for name in order}
    for group in groups:
        members = set().union(*(joined[name] for name in group))
        joined |= dict.fromkeys(members, members)
    seen: set[str] = set()
    for name in order:
        if name not in seen:
            seen |= joined[name]
            yield tuple(other for other in order if other in joined[name])
