"""Gradients that are reduced together: flat buffers, and the offset of each parameter's gradient in them.

There are two kinds of bucket. After an all-reduce, every rank has the sums of all gradients, which stay views of the
buffer. After a reduce-scatter, each rank has the sums of its own shard (dim 0, split as `torch.chunk` splits), and the
buffer is returned to a pool. Both send one extra number per parameter, which counts the ranks that had a gradient at
all: a parameter that is unused here and used elsewhere must get the gradient of the other ranks.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallelize.base.layout import even_interval
from parallelize.base.patches import active as patches
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group
from parallelize.state.layout_tensor.layout_dtensor import wrap_like

T = torch.Tensor


def to_local(x: Any) -> T:
    """The local tensor of a DTensor, or the plain tensor."""
    return private.plain_local(x)


def as_gradient(param: Any, value: T) -> Any:
    """A local tensor as a gradient of `param` that autograd and optimizers accept."""
    return wrap_like(param, value) if isinstance(param, DTensor) else value


def serve_deep_copies() -> None:
    """Let `copy.deepcopy` of a model copy its gradients, which are DTensors of views, or wider than parameters."""
    patches.replace(DTensor, "__deepcopy__", _copying_views)


def _copying_views(stock: Callable[..., Any]) -> Callable[..., Any]:
    def deep_copy(self: Any, memo: dict[int, Any]) -> Any:
        is_wider = self.grad is not None and self.grad.dtype != self.dtype
        if id(self) in memo or not self.is_leaf or not (self.storage_offset() or is_wider):
            return stock(self, memo)
        copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        if is_wider:
            copied.grad_dtype = None  # as of the parameter, which PyTorch's copy does not keep
        copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    return deep_copy


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, elements per row) of a parameter as ZeRO splits it: along dim 0. A scalar is one row."""
    if not shape:
        return 1, 1
    width = 1
    for size in shape[1:]:
        width *= size
    return shape[0], width


@dataclass(frozen=True)
class BucketParams:
    """The parameters of one bucket.

    Attributes:
        uses: how often a backward adds to each gradient: once per module, where planned modules are tied.
        stage: the pipeline stage. late: the gradients are known only when a step ends. dtype: the dtype of the sums.
        groups: the groups over which they are summed; for a reduce-scatter, without the shard group.
    """

    params: list[Any]
    uses: list[int]
    stage: int
    late: bool
    dtype: torch.dtype
    groups: Sequence[Group] = field(default=())


class Bucket(ABC):
    """Parameters whose gradients are reduced together: see `BucketParams` for the attributes."""

    def __init__(self, members: BucketParams):
        self.params, self.uses = members.params, members.uses
        self.stage, self.late, self.dtype, self.groups = members.stage, members.late, members.dtype, members.groups
        self.device = self.params[0].device
        self.index = {id(param): n for n, param in enumerate(self.params)}
        self.counts = [0] * len(self.params)
        self.num_ranks = math.prod(group.size for group in self.groups)
        self.pending: list[Any] = []  # works of collectives that have been started

    @property
    def complete(self) -> bool:
        """Whether a backward has added to every gradient as often as it will."""
        return self.counts == self.uses

    def count_gradient(self, param: Any) -> int:
        """Count one addition to a parameter's gradient, and return the parameter's index."""
        n = self.index[id(param)]
        self.counts[n] += 1
        return n

    def reset_counts(self) -> None:
        """Start counting for a new backward."""
        self.counts = [0] * len(self.params)

    def wait(self) -> None:
        """Wait for the collectives that have been started."""
        for work in self.pending:
            work.wait()
        self.pending = []

    @abstractmethod
    def prepare_for_backward(self) -> None:
        """Make gradients that may have been reduced ready for a backward that adds to them."""

    @abstractmethod
    def collect_gradient(self, param: Any) -> None:
        """Count a gradient to which a backward has added, and copy it where it is reduced."""

    def cast_to_sum_dtype(self, param: Any) -> None:
        """Convert a gradient that is reduced later to the dtype of the sums, so that adding loses nothing."""

    @abstractmethod
    def start_reduction(self) -> None:
        """Start to reduce the gradients."""

    @abstractmethod
    def finish_reduction(self) -> None:
        """Wait for the reduction, and store its result."""

    def set_grads(self) -> None:
        """Set `.grad` of the parameters to the sums, if they are elsewhere."""

    @abstractmethod
    def discard_sums(self) -> None:
        """Forget what a failed step has reduced."""


class AllReduceBucket(Bucket):
    """The gradients are views of one buffer; an all-reduce sums it in place."""

    def __init__(self, members: BucketParams):
        super().__init__(members)
        sizes = [to_local(param).numel() for param in self.params]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=self.dtype, device=self.device)
        if any(isinstance(param, DTensor) for param in self.params):
            serve_deep_copies()
        parts = self.flat.split([*sizes, len(sizes)])
        self.views = [part.view(to_local(p).shape) for part, p in zip(parts, self.params, strict=False)]
        self.present = parts[-1]
        self.reduced = False

    def collect_gradient(self, param: Any) -> None:
        self._store_in_buffer(param, self.views[self.count_gradient(param)])

    def _store_in_buffer(self, param: Any, view: T) -> None:
        if not _is_same(to_local(param.grad), view):
            view.copy_(to_local(param.grad))
            param.grad = as_gradient(param, view)

    def prepare_for_backward(self) -> None:
        """Divide sums by the number of ranks: a backward adds to them, and the next all-reduce multiplies them
        again."""
        if self.reduced and any(param.grad is not None for param in self.params):
            for param, view in zip(self.params, self.views, strict=True):
                if param.grad is not None:  # which the user may have replaced
                    self._store_in_buffer(param, view)
            self.flat.mul_(1.0 / self.num_ranks)
        self.reduced = False

    def start_reduction(self) -> None:
        self.reset_counts()
        self.prepare_for_backward()
        self.present.fill_(1.0)
        for n, param in enumerate(self.params):
            if param.grad is None:
                self.views[n].zero_()
                self.present[n] = 0.0
        if len(self.groups) == 1:
            self.pending = [dist.all_reduce(self.flat, group=self.groups[0].pg, async_op=True)]
        else:
            for group in self.groups:
                group.all_reduce(self.flat)

    def finish_reduction(self) -> None:
        """Wait, and set the gradients of parameters that had one on other ranks only."""
        self.wait()
        self.reduced = True
        for n, param in enumerate(self.params):
            if param.grad is None and bool(self.present[n] > 0):
                param.grad = as_gradient(param, self.views[n])

    def discard_sums(self) -> None:
        self.reduced = False


class BufferPool:
    """Flat buffers that the buckets use one after another, so that a step allocates no memory."""

    def __init__(self) -> None:
        self._free: list[T] = []

    def acquire(self, count: int, dtype: torch.dtype, device: torch.device) -> T:
        """A flat, uninitialized tensor of `count` elements: the smallest free buffer that is large enough, or a new
        one."""
        fitting = [x for x in self._free if x.dtype == dtype and x.device == device and len(x) >= count]
        if not fitting:
            return torch.empty(count, dtype=dtype, device=device)
        best = min(fitting, key=len)
        self._free = [x for x in self._free if x is not best]
        return best[:count]

    def release(self, x: T) -> None:
        """Return a tensor from `acquire` to the pool."""
        self._free.append(x if x._base is None else x._base)


@dataclass(frozen=True)
class _BufferRows:
    """Where one parameter's gradient is in each rank's part of a flat buffer."""

    rows: int
    width: int
    rows_per_rank: int
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.rows_per_rank * self.width


class ReduceScatterBucket(Bucket):
    """Each rank keeps the sums of its own rows; nothing of full size outlives the reduction.

    Args:
        shard: the group that splits the gradients. specs: id of a parameter -> the spec of its split gradient.
    """

    def __init__(self, members: BucketParams, *, shard: Group, specs: dict[int, Any], pool: BufferPool):
        super().__init__(members)
        self.groups = [group for group in self.groups if group.size > 1]
        self.shard, self.specs, self.pool = shard, specs, pool
        self.num_ranks *= shard.size
        self.rows: list[_BufferRows] = []
        self.size = 0
        for param in self.params:
            rows, width = matrix_shape(to_local(param).shape)
            self.rows.append(_BufferRows(rows, width, -(-rows // shard.size), self.size))
            self.size = self.rows[-1].stop
        self.sums = torch.zeros(0, dtype=self.dtype, device=self.device)  # of this rank's rows, over a step's backwards
        self.ids_with_sum: set[int] = set()  # ids of parameters that have a sum
        self.grads_are_sums = False  # whether `.grad` of the parameters is the sums
        self._had_grad: list[bool] = []
        self._input: T | None = None
        self._output: T | None = None

    def collect_gradient(self, param: Any) -> None:
        self.count_gradient(param)

    def cast_to_sum_dtype(self, param: Any) -> None:
        grad = to_local(param.grad)
        if grad.dtype != self.dtype:
            param.grad = as_gradient(param, grad.to(self.dtype))

    def start_reduction(self) -> None:
        """Start the reduce-scatter over the shard group; `finish_reduction` reduces its result over the others."""
        self.reset_counts()
        self.prepare_for_backward()
        count = self.shard.size
        self._had_grad = [param.grad is not None for param in self.params]
        size = self.size + len(self.params)
        self._input = self.pool.acquire(count * size, self.dtype, self.device)
        self._output = self.pool.acquire(size, self.dtype, self.device)
        by_rank = self._input.view(count, size)
        by_rank[:, self.size :] = by_rank.new_tensor(self._had_grad)
        for place, param in zip(self.rows, self.params, strict=True):
            self._pack(by_rank, place, None if param.grad is None else to_local(param.grad))
            param.grad = None
        self.pending = [_reduce_scatter(self._output, self._input, self.shard, self.pool)]

    def _pack(self, by_rank: T, place: _BufferRows, grad: T | None) -> None:
        """Copy a gradient into the buffer, the rows of each rank to that rank's part; zeros for None and for
        padding."""
        count, part = self.shard.size, by_rank[:, place.offset : place.stop]
        if grad is None:
            part.zero_()
            return
        flat = grad.reshape(place.rows, place.width)
        if place.rows == count * place.rows_per_rank:
            part.copy_(flat.reshape(count, place.rows_per_rank * place.width))
            return
        part.zero_()
        for rank in range(count):
            start, stop = even_interval(place.rows, count, rank)
            if stop > start:
                part[rank, : (stop - start) * place.width].copy_(flat[start:stop].reshape(-1))

    def finish_reduction(self) -> None:
        """Wait for the reduce-scatter, reduce over the other groups, and add the result to the sums."""
        self.wait()
        assert self._input is not None and self._output is not None
        for group in self.groups:
            group.all_reduce(self._output)
        values, present = self._output.split([self.size, len(self.params)])
        for n, param in enumerate(self.params):
            if self._had_grad[n] or bool(present[n] > 0):
                self.ids_with_sum.add(id(param))
        if self.sums.numel():
            self.sums.add_(values)
        else:
            self.sums = values.clone()
        self.pool.release(self._input)
        self.pool.release(self._output)
        self._input = self._output = None

    def _sum_of(self, n: int) -> T:
        """The sums of this rank's rows of parameter `n`, as a view."""
        place = self.rows[n]
        start, stop = even_interval(place.rows, self.shard.size, self.shard.rank)
        shape = to_local(self.params[n]).shape
        return self.sums[place.offset : place.offset + (stop - start) * place.width].view(stop - start, *shape[1:])

    def set_grads(self) -> None:
        """Set `.grad` of the parameters to the sums: DTensors that the data axis shards too."""
        if self.grads_are_sums:
            return
        for n, param in enumerate(self.params):
            if id(param) in self.ids_with_sum:
                value = self._sum_of(n)
                param.grad = wrap_like(param, value, self.specs[id(param)])
        self.grads_are_sums = True

    def prepare_for_backward(self) -> None:
        """Take the sums out of `.grad`, so that a backward can fill it; drop a sum where the user reset `.grad`."""
        if not self.grads_are_sums:
            return
        set_by_user = [param for param in self.params if param.grad is not None and id(param) not in self.ids_with_sum]
        if set_by_user and not self.sums.numel():
            self.sums = self.sums.new_zeros(self.size)
        self.ids_with_sum |= {id(param) for param in set_by_user}
        for n, param in enumerate(self.params):
            if id(param) in self.ids_with_sum:
                value = self._sum_of(n)
                if param.grad is None:  # zero_grad
                    value.zero_()
                    self.ids_with_sum.discard(id(param))
                elif not _is_same(to_local(param.grad), value):  # which the user has replaced
                    value.copy_(to_local(param.grad))
            param.grad = None
        self.grads_are_sums = False
        if not self.ids_with_sum:
            self.sums = self.sums.new_zeros(0)

    def discard_sums(self) -> None:
        self.ids_with_sum.clear()
        self.grads_are_sums = False
        self.sums = self.sums.new_zeros(0)


def _is_same(grad: T, value: T) -> bool:
    return grad.data_ptr() == value.data_ptr() and grad.dtype == value.dtype


def _reduce_scatter(out: T, full: T, group: Group, pool: BufferPool) -> Any:
    if group.backend(out.device) != "gloo":
        return group.reduce_scatter_into(out, full)
    return _AllToAllSum(out, full, group, pool)


class _AllToAllSum:
    """A reduce-scatter for gloo, whose own sends as much as its all-reduce. An all-to-all sends half of that."""

    def __init__(self, out: T, full: T, group: Group, pool: BufferPool):
        self.out, self.group, self.pool = out, group, pool
        self.parts = pool.acquire(len(full), full.dtype, full.device)
        self.work = dist.all_to_all_single(self.parts, full, group=group.pg, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.parts.view(self.group.size, -1), dim=0, out=self.out)
        self.pool.release(self.parts)
