"""A data rank's shard of a parameter: what its optimizer steps, as a DTensor that the data axis shards too."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelize.applied.layout_tensor.layout_dtensor import wrap_like
from parallelize.comm.groups import Group
from parallelize.comm.meshes import mesh_spec
from parallelize.layout import even_interval
from parallelize.torch_private import torch_tensors as private
from parallelize.zero.buckets import matrix_shape, to_local

T = torch.Tensor


def split_spec(param: Any, mesh: DeviceMesh, axis: str) -> Any:
    """The spec of a parameter that `axis` shards along dim 0, in addition to tensor parallelism: as `fully_shard` does."""
    local = to_local(param)
    if isinstance(param, DTensor):
        tp = mesh_spec(param.device_mesh).names[0]
        placement, shape = private.spec_of(param).placements[0], tuple(param.shape)
        submesh = mesh[axis, tp] if axis != tp else mesh[axis]
        split = private.split_above(placement, mesh_spec(mesh).size(tp))
        placements: tuple[Any, ...] = (split, placement)
    else:
        submesh, shape, placements = mesh[axis], tuple(local.shape), (Shard(0),)
    if not shape:
        placements = tuple(Replicate() for _ in placements)
    return private.spec(submesh, placements, torch.empty(shape, dtype=local.dtype, device="meta"))


_EDIT_BLOCK = 1 << 15
"""Elements that a CPU compares at once, so that what it rounds stays in its cache."""


class OptimizerShard:
    """This data rank's rows of one parameter.

    Args:
        param: the model's.
        group: the group over which its rows are split; a group of size 1 splits nothing.
        spec: the spec of the DTensor that `stepped` becomes. None: the parameter's own.
        master: the dtype of a wider copy that the optimizer steps. None: no copy.

    Attributes:
        stepped: what the optimizer steps: the parameter, a view of this rank's rows, or a wider copy of them.
        even: whether every rank has as many rows.
    """

    def __init__(self, name: str, param: Any, group: Group, spec: Any, master: torch.dtype | None):
        self.name, self.param, self.group, self.spec = name, param, group, spec
        rows, _ = matrix_shape(to_local(param).shape)
        self.start, self.stop = even_interval(rows, group.size, group.rank)
        self.even = rows % group.size == 0
        self.has_master = master is not None and param.is_floating_point()
        value = self.slice_of(to_local(param).detach())
        if self.has_master:
            value = value.to(master, copy=True)
        self._is_loaded = False  # the master, since the last step
        self._taken: tuple[weakref.ref[T], int] | None = None  # the parameter's gradient, and its version
        self.stepped = param if group.size == 1 and not self.has_master else self._parameter(value)

    def _parameter(self, value: T) -> nn.Parameter:
        wrapped = wrap_like(self.param, value, self.spec) if self.spec or isinstance(self.param, DTensor) else value
        return nn.Parameter(wrapped, requires_grad=self.param.requires_grad)

    def slice_of(self, local: T) -> T:
        """This rank's rows of a tensor shaped like the parameter's local tensor. A scalar belongs to the first rank."""
        if self.group.size == 1:
            return local
        if local.ndim == 0:
            return local.reshape(1)[self.start : self.stop]
        return local[self.start : self.stop]

    def refresh(self, keeps: bool = False) -> None:
        """Before a step: follow the parameter to new storage (after `.to()`), and take this step's gradient.

        keeps: a gradient that was taken in another dtype, and scaled since, is not taken again from one that is unchanged.
        """
        if self.stepped is self.param:
            return
        if not self.has_master:
            current = self.slice_of(to_local(self.param).detach())
            stepped = to_local(self.stepped)
            if current.data_ptr() != stepped.data_ptr() or current.dtype != stepped.dtype:
                self._move(current)
        grad = None if self.param.grad is None else to_local(self.param.grad)
        if not (keeps and grad is not None and self._is_taken(grad)):
            self.stepped.grad = self._gradient()
        self._taken = None if grad is None else (weakref.ref(grad), grad._version)

    def _is_taken(self, grad: T) -> bool:
        """Whether the optimizer's gradient is a wider copy of this one, as it is now."""
        if self._taken is None or self.stepped.grad is None:
            return False
        return self._taken[0]() is grad and self._taken[1] == grad._version and grad.dtype != self.stepped.grad.dtype

    def _move(self, current: T) -> None:
        new = self._parameter(current)
        if isinstance(new, DTensor):
            private.set_local(self.stepped, to_local(new))
        else:
            self.stepped.data = new.data

    def _gradient(self) -> Any:
        if self.param.grad is None:
            return None
        grad = to_local(self.param.grad)
        if tuple(grad.shape) != tuple(to_local(self.stepped).shape):  # stages 0 and 1: gradients are not split
            grad = self.slice_of(grad)
        if grad.dtype != self.stepped.dtype:
            grad = grad.to(self.stepped.dtype)
        if isinstance(self.stepped, DTensor):
            return wrap_like(self.stepped, grad)
        return grad

    def publish(self) -> None:
        """After a step: copy the master to the parameter, in the parameter's dtype."""
        self._is_loaded = False
        if self.has_master:
            rows = self.slice_of(to_local(self.param).detach())
            rows.copy_(to_local(self.stepped.detach()))

    @torch.no_grad()
    def follow_edits(self) -> None:
        """Before a step: copy to the master the elements of the parameter that were written since `publish`.

        An edit (`mul_`, `clamp_`, weights swapped in, pruned or drawn again) has the precision of the parameter; all other
        elements keep that of the master. Elements are compared with the rounded master, because `.data` and DTensors are
        written without a trace. On an accelerator nothing is read back: the host does not wait.
        """
        if not self.has_master:
            return
        rows, master = self.slice_of(to_local(self.param).detach()), to_local(self.stepped).detach()
        size = _EDIT_BLOCK if rows.is_cpu else max(1, rows.numel())
        for row_block, master_block in zip(rows.reshape(-1).split(size), master.view(-1).split(size), strict=True):
            expected = master_block.to(rows.dtype)
            if not (rows.is_cpu and torch.equal(row_block, expected)):
                master_block.copy_(torch.where(row_block == expected, master_block, row_block))

    def load_master(self, value: T) -> None:
        """Set the master, of which the weights that are loaded with it are the rounded values."""
        to_local(self.stepped).detach().copy_(value)
        self._is_loaded = True

    def reload(self) -> None:
        """Copy the parameter to the master, after weights were loaded; to a loaded master, where they are not its own."""
        if self._is_loaded:
            self.follow_edits()
        elif self.has_master:
            to_local(self.stepped).detach().copy_(self.slice_of(to_local(self.param).detach()))


GATHER_BYTES = 1 << 20
"""Parameters of at least this size are gathered one by one, in place; smaller ones share a buffer."""


@torch.no_grad()
def gather_parameters(shards: list[OptimizerShard]) -> None:
    """Give every rank all rows of all parameters, each from the rank that has stepped it."""
    small: dict[tuple, list[OptimizerShard]] = {}
    works = []  # all are started before one is waited for, so that their latencies overlap
    for shard in shards:
        if shard.group.size == 1 or not shard.param.requires_grad:
            continue
        local = to_local(shard.param).detach()
        if shard.even and local.is_contiguous() and local.numel() * local.element_size() >= GATHER_BYTES:
            works.append(shard.group.all_gather_into(local, shard.slice_of(local)))
        else:
            small.setdefault((shard.group, local.dtype, local.device), []).append(shard)
    for (group, dtype, device), together in small.items():
        _gather_together(group, dtype, device, together)
    for work in works:
        work.wait()


def _gather_together(group: Group, dtype: torch.dtype, device: torch.device, shards: list[OptimizerShard]) -> None:
    """Gather small parameters in one buffer, to which each rank adds as much as the first, padded with zeros."""
    sizes = []
    for shard in shards:
        rows, width = matrix_shape(to_local(shard.param).shape)
        sizes.append(math.ceil(rows / group.size) * width)
    buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
    for shard, part in zip(shards, buffer.split(sizes), strict=True):
        values = shard.slice_of(to_local(shard.param).detach())
        part[: values.numel()].copy_(values.reshape(-1))
    by_rank = group.all_gather(buffer)
    offset = 0
    for shard, size in zip(shards, sizes, strict=True):
        _copy_gathered(to_local(shard.param).detach(), by_rank, offset)
        offset += size


def _copy_gathered(local: T, by_rank: T, offset: int) -> None:
    """Fill a local tensor with the rows of every rank, which begin at `offset` of that rank's buffer."""
    rows, width = matrix_shape(local.shape)
    ranks = len(by_rank)
    counts = [stop - start for start, stop in (even_interval(rows, ranks, rank) for rank in range(ranks))]
    parts = [by_rank[rank, offset : offset + count * width] for rank, count in enumerate(counts) if count]
    joined = torch.cat(parts) if parts else local.new_empty(0)
    if local.is_contiguous():
        local.reshape(-1).copy_(joined)
    else:
        local.copy_(joined.view(local.shape))
