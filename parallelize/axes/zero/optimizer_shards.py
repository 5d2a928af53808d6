"""A data rank's shard of a parameter: what its optimizer steps, as a DTensor that the data axis shards too."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelize.axes.zero.buckets import as_gradient, matrix_shape, to_local
from parallelize.base.layout import even_interval
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.comm.mesh_view import MeshView
from parallelize.comm.meshes import mesh_spec
from parallelize.state.layout_tensor.kept_gradients import keep_gradient
from parallelize.state.layout_tensor.layout_dtensor import wrap_like

T = torch.Tensor


def split_spec(param: Any, mesh: MeshView, axis: str) -> Any:
    """The spec of a parameter that `axis` shards along dim 0, in addition to tensor parallelism: as `fully_shard`
    does."""
    local = to_local(param)
    if isinstance(param, DTensor):
        tp = mesh_spec(param.device_mesh).names[0]
        placement, shape = private.spec_of(param).placements[0], tuple(param.shape)
        submesh = mesh.device_mesh[axis, tp] if axis != tp else mesh.device_mesh[axis]
        split = private.split_above(placement, mesh.spec.size(tp))
        placements: tuple[Any, ...] = (split, placement)
    else:
        submesh, shape, placements = mesh.device_mesh[axis], tuple(local.shape), (Shard(0),)
    if not shape:
        placements = tuple(Replicate() for _ in placements)
    return private.spec(submesh, placements, torch.empty(shape, dtype=local.dtype, device="meta"))


def _without_split(spec: Any) -> Any:
    """The spec of a tensor whose rows are all on each rank of the data axis, the first axis of the mesh."""
    return type(spec)(spec.mesh, (Replicate(), *spec.placements[1:]), tensor_meta=spec.tensor_meta)


_EDIT_BLOCK = 1 << 15
"""Elements that a CPU compares at once, so that what it rounds stays in its cache."""


class OptimizerShard:
    """This data rank's rows of one parameter.

    Args:
        param: the model's.
        group: the group over which its rows are split; a group of size 1 splits nothing.
        spec: the spec of the DTensor that `stepped` becomes. None: the parameter's own.
        master: the dtype of a wider copy that the optimizer steps. None: no copy.
        splits_gradient: whether the parameter's gradient, too, has this rank's rows alone, as under stage 2.

    Attributes:
        stepped: what the optimizer steps: the parameter, a view of this rank's rows, or a wider copy of them.
        even: whether every rank has as many rows.
    """

    def __init__(
        self,
        name: str,
        param: Any,
        group: Group,
        spec: Any,
        master: torch.dtype | None,
        splits_gradient: bool = False,
    ):
        self.name, self.param, self.group, self.spec = name, param, group, spec
        self._is_full = group.size > 1 and not splits_gradient  # the gradient has the rows of all ranks
        rows, _ = matrix_shape(to_local(param).shape)
        self.start, self.stop = even_interval(rows, group.size, group.rank)
        self.even = rows % group.size == 0
        self.has_master = master is not None and param.is_floating_point()
        value = self.slice_of(to_local(param).detach())
        if self.has_master:
            value = value.to(master, copy=True)
        self._is_loaded = False  # the master, since the last step
        self._rows: Any = None  # while an optimizer steps, the gradient of `stepped`
        self._steps = False  # whether an optimizer steps now
        self._wrapper: weakref.ref[Any] | None = None  # of the gradient that `stepped` shows
        self.stepped: Any = param if group.size == 1 and not self.has_master else self._parameter(value)
        if self.stepped is not param:
            keep_gradient(self.stepped, self)

    def _parameter(self, value: T) -> nn.Parameter:
        wrapped = wrap_like(self.param, value, self.spec) if self.spec or isinstance(self.param, DTensor) else value
        return private.parameter_of(wrapped, self.param.requires_grad)

    def slice_of(self, local: T) -> T:
        """This rank's rows of a tensor shaped like the parameter's local tensor. A scalar belongs to the first rank."""
        if self.group.size == 1:
            return local
        if local.ndim == 0:
            return local.reshape(1)[self.start : self.stop]
        return local[self.start : self.stop]

    @property
    def gradient(self) -> Any:
        """`stepped.grad`: all of the parameter's own gradient, in the dtype of `stepped`; in a step this rank's rows of
        it."""
        if self._steps:
            return self._rows
        grad = self._widened()
        return self._wrapped(grad) if grad is not None and self._is_full else grad

    @gradient.setter
    def gradient(self, value: Any) -> None:
        if self._steps:
            self._rows = value
            return
        if self._is_full and isinstance(value, DTensor) and value.device_mesh == self.stepped.device_mesh:
            value = as_gradient(self.param, to_local(self._replicated(value)))
        self._set(value)

    def _set(self, grad: Any) -> None:
        if grad is not None and grad.dtype != self.param.dtype:
            self.param.grad_dtype = None  # else PyTorch refuses a gradient that is wider than the parameter
        self.param.grad = grad

    def _widened(self) -> Any:
        """The parameter's gradient, after it was converted to the dtype of `stepped`, where gradients are summed in a
        narrower one: scaling must not round it."""
        grad = self.param.grad
        if grad is not None and grad.dtype != self.stepped.dtype:
            local = to_local(grad).to(self.stepped.dtype)
            self._set(wrap_like(grad, local) if isinstance(grad, DTensor) else local)
        return self.param.grad

    def _wrapped(self, grad: Any) -> Any:
        """A full gradient on the mesh of `stepped`, so that it can be computed with; the same object while it is in
        use."""
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is None or to_local(wrapper) is not to_local(grad):
            wrapper = wrap_like(self.stepped, to_local(grad), _without_split(private.spec_of(self.stepped)))
            self._wrapper = weakref.ref(wrapper)
        return wrapper

    def _replicated(self, value: Any) -> Any:
        """A gradient on the mesh of `stepped` with the rows of all ranks: gathered where it has those of this rank
        alone."""
        placements = (Replicate(), *value.placements[1:])
        return value if value.placements[0] == placements[0] else value.redistribute(placements=placements)

    def add_to_gradient(self, local: T) -> None:
        """Add to the summed gradient what is the same on all data ranks. local: shaped like the parameter's local
        tensor."""
        rows = local if self._is_full else self.slice_of(local)
        grad = self.param.grad
        if grad is not None:
            to_local(grad).add_(rows)
        elif self._is_full or self.group.size == 1:
            self._set(as_gradient(self.param, rows))
        else:
            self._set(wrap_like(self.param, rows, self.spec))

    def begin_step(self) -> None:
        """Follow the parameter to new storage (after `.to()`), and let `stepped.grad` be this rank's rows of the
        gradient."""
        if not self.has_master:
            current = self.slice_of(to_local(self.param).detach())
            stepped = to_local(self.stepped)
            if current.data_ptr() != stepped.data_ptr() or current.dtype != stepped.dtype:
                self._move(current)
        self._rows, self._steps = self._own_rows(), True

    def end_step(self) -> None:
        """Let `stepped.grad` be the parameter's gradient again."""
        self._rows, self._steps = None, False

    def _move(self, current: T) -> None:
        new = self._parameter(current)
        if isinstance(new, DTensor):
            private.set_local(self.stepped, to_local(new))
        else:
            self.stepped.data = new.data

    def _own_rows(self) -> Any:
        if self.param.grad is None:
            return None
        grad = to_local(self.param.grad)
        if self._is_full:
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

        An edit (`mul_`, `clamp_`, weights swapped in, pruned or drawn again) has the precision of the parameter; all
        other elements keep that of the master. Elements are compared with the rounded master, because `.data` and
        DTensors are written without a trace. On an accelerator nothing is read back: the host does not wait.
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
        """Copy the parameter to the master, after weights were loaded; to a loaded master, where they are not its
        own."""
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
        if shard.group.size == 1 or not (shard.param.requires_grad or shard.param.grad is not None):
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
