"""A data rank's own rows of a parameter: what its part of the optimiser steps, as a DTensor over the data axis too."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as SplitDim

from parallelize import _torch_private as private
from parallelize.groups import Group, mesh_spec
from parallelize.layout import even_interval
from parallelize.zero.buckets import local, rows_of

T = torch.Tensor


def split_spec(param: Any, mesh: DeviceMesh, axis: str) -> Any:
    """The spec of a parameter's rows split over `axis`, above what tensor parallelism has split: as `fully_shard` has it."""
    own = local(param)
    if isinstance(param, DTensor):
        tp = next(name for name in mesh_spec(param.device_mesh).names)
        placement, shape = param.placements[0], tuple(param.shape)
        both = mesh[axis, tp] if axis != tp else mesh[axis]
        split = private.split_above(placement, mesh_spec(mesh).size(tp))
        placements: tuple[Any, ...] = (split, placement)
    else:
        both, shape, placements = mesh[axis], tuple(own.shape), (SplitDim(0),)
    if not shape:
        placements = tuple(Replicate() for _ in placements)
    return private.spec(both, placements, torch.empty(shape, dtype=own.dtype, device="meta"))


class Shard:
    """One parameter's own rows.

    Attributes:
        param: the model's. group: over which rows are split (of size 1: none are). spec: of the DTensor that stands for
            them, None for the parameter's own. stepped: what the optimiser holds.
    """

    def __init__(self, name: str, param: Any, group: Group, spec: Any, master: torch.dtype | None):
        self.name, self.param, self.group, self.spec = name, param, group, spec
        rows, _ = rows_of(local(param).shape)
        self.start, self.stop = even_interval(rows, group.size, group.rank)
        self.even = rows % group.size == 0
        self.has_master = master is not None and param.is_floating_point() and param.dtype != torch.float64
        value = self.rows(local(param).detach())
        if self.has_master:
            value = value.to(master, copy=True)
        self.stepped = param if group.size == 1 and not self.has_master else self._parameter(value)

    def _parameter(self, value: T) -> nn.Parameter:
        spec = self.spec
        if spec is None and isinstance(self.param, DTensor):
            spec = private.spec_of(self.param)
        shown = value if spec is None else private.wrap(value, private.with_dtype(spec, value))
        return nn.Parameter(shown, requires_grad=self.param.requires_grad)

    def rows(self, whole: T) -> T:
        """Own rows of a tensor shaped as the parameter's local part. A scalar belongs to the first rank."""
        if self.group.size == 1:
            return whole
        if whole.ndim == 0:
            return whole.reshape(1)[self.start : self.stop]
        return whole[self.start : self.stop]

    def refresh(self) -> None:
        """Before a step: the rows may lie in other storage than before (`.to()`), and the gradient is this step's."""
        if self.stepped is self.param:
            return
        if not self.has_master:
            own = self.rows(local(self.param).detach())
            held = local(self.stepped)
            if own.data_ptr() != held.data_ptr() or own.dtype != held.dtype:
                self._move(own)
        self.stepped.grad = self._gradient()

    def _move(self, own: T) -> None:
        new = self._parameter(own)
        if isinstance(new, DTensor):
            private.set_local(self.stepped, local(new))
        else:
            self.stepped.data = new.data

    def _gradient(self) -> Any:
        grad = self.param.grad
        if grad is None:
            return None
        held = local(grad)
        own = held if tuple(held.shape) == tuple(local(self.stepped).shape) else self.rows(held)
        if own.dtype != self.stepped.dtype:
            own = own.to(self.stepped.dtype)
        if isinstance(self.stepped, DTensor):
            return private.wrap(own, private.with_dtype(private.spec_of(self.stepped), own))
        return own

    def publish(self) -> None:
        """After a step: own rows of a master, in the parameter's dtype, stand in the parameter."""
        if self.has_master:
            own = self.rows(local(self.param).detach())
            own.copy_(local(self.stepped.detach()))

    def reload(self) -> None:
        """The other way: the master takes the parameter's values (weights were loaded)."""
        if self.has_master:
            local(self.stepped).detach().copy_(self.rows(local(self.param).detach()))


GATHER_BYTES = 1 << 20
"""From here on a parameter is gathered by itself, in place; smaller ones share a buffer."""


@torch.no_grad()
def gather_parameters(shards: list[Shard]) -> None:
    """Give every rank all rows of all parameters, which their owners have stepped."""
    small: dict[tuple, list[Shard]] = {}
    going = []  # all at once: one's way hides the next one's start
    for shard in shards:
        if shard.group.size == 1 or not shard.param.requires_grad:
            continue
        whole = local(shard.param).detach()
        if shard.even and whole.is_contiguous() and whole.numel() * whole.element_size() >= GATHER_BYTES:
            going.append(shard.group.all_gather_into(whole, shard.rows(whole)))
        else:
            small.setdefault((shard.group, whole.dtype, whole.device), []).append(shard)
    for (group, dtype, device), together in small.items():
        _gather_together(group, dtype, device, together)
    for work in going:
        work.wait()


def _gather_together(group: Group, dtype: torch.dtype, device: torch.device, shards: list[Shard]) -> None:
    sizes = []
    for shard in shards:
        rows, width = rows_of(local(shard.param).shape)
        sizes.append(math.ceil(rows / group.size) * width)
    mine = torch.zeros(sum(sizes), dtype=dtype, device=device)
    for shard, part in zip(shards, mine.split(sizes), strict=True):
        own = shard.rows(local(shard.param).detach())
        part[: own.numel()].copy_(own.reshape(-1))
    everyone = group.all_gather(mine)
    at = 0
    for shard, size in zip(shards, sizes, strict=True):
        whole = local(shard.param).detach()
        rows, width = rows_of(whole.shape)
        flat = whole.reshape(-1) if whole.is_contiguous() else None
        taken = [everyone[r, at : at + n * width] for r in range(group.size) if (n := _rows_on(rows, group.size, r))]
        joined = torch.cat(taken) if taken else whole.new_empty(0)
        (whole if flat is None else flat).copy_(joined.view(whole.shape) if flat is None else joined)
        at += size


def _rows_on(rows: int, ranks: int, rank: int) -> int:
    start, stop = even_interval(rows, ranks, rank)
    return stop - start
