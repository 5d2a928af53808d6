"""Gradients that are sent together: flat buffers, and where each parameter's part of them lies.

Two forms. Whole: every rank ends with the sum of all gradients, which stay views of the buffer. Split: each rank ends with
the sum of its own rows (dim 0, cut as `torch.chunk` cuts) and the buffer goes. Both carry one number a parameter that counts
on how many ranks it had a gradient at all, so that a parameter unused here and used elsewhere gets what it must.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from parallelize import _torch_private as private
from parallelize.groups import Group
from parallelize.layout import even_interval

T = torch.Tensor


def local(x: Any) -> T:
    """This rank's part of a DTensor, or the plain tensor."""
    return private.local_of(x) if isinstance(x, DTensor) else x


def shown_like(param: Any, value: T) -> Any:
    """A local tensor as a gradient of `param` that autograd and optimisers understand."""
    if not isinstance(param, DTensor):
        return value
    return private.wrap(value, private.with_dtype(private.spec_of(param), value))


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, elements a row) of a parameter as ZeRO cuts it: along dim 0; a scalar is one row."""
    if not shape:
        return 1, 1
    width = 1
    for size in shape[1:]:
        width *= size
    return shape[0], width


class Bucket:
    """Parameters whose gradients are reduced together. `stage`: of the pipeline. `late`: known only when a step ends."""

    def __init__(self, params: list[Any], uses: list[int], stage: int, late: bool, dtype: torch.dtype):
        self.params, self.stage, self.late, self.dtype = params, stage, late, dtype
        self.device = params[0].device
        self.place = {id(param): n for n, param in enumerate(params)}
        self.uses = uses  # how often a backward adds to each: planned modules that are tied do so one by one
        self.counts = [0] * len(params)
        self.pending: list[Any] = []  # works on their way

    @property
    def complete(self) -> bool:
        return self.counts == self.uses

    def count(self, param: Any) -> int:
        """A backward has added to a parameter's gradient; its place."""
        n = self.place[id(param)]
        self.counts[n] += 1
        return n

    def begin(self) -> None:
        """A backward that counts begins."""
        self.counts = [0] * len(self.params)

    def widen(self, param: Any) -> None:
        """Keep a gradient that waits in the dtype in which it is summed, so that nothing is lost in adding."""
        grad = local(param.grad)
        if grad.dtype != self.dtype:
            param.grad = shown_like(param, grad.to(self.dtype))

    def wait(self) -> None:
        for work in self.pending:
            work.wait()
        self.pending = []


class WholeBucket(Bucket):
    """Gradients live in the buffer; an all-reduce makes them sums."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        sizes = [local(param).numel() for param in self.params]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=self.dtype, device=self.device)
        parts = self.flat.split([*sizes, len(sizes)])
        self.views = [part.view(local(p).shape) for part, p in zip(parts, self.params, strict=False)]
        self.present = parts[-1]
        self.ranks = 1
        self.reduced = False

    def take(self, param: Any) -> None:
        """The gradient that a backward has added to, kept in the buffer."""
        view = self.views[self.count(param)]
        grad = local(param.grad)
        if grad.data_ptr() != view.data_ptr() or grad.dtype != view.dtype:
            view.copy_(grad)
            param.grad = shown_like(param, view)

    def reopen(self) -> None:
        """What was reduced before may be added to: each rank keeps its share, so that the sum stays the sum."""
        if self.reduced and any(param.grad is not None for param in self.params):
            self.flat.mul_(1.0 / self.ranks)
        self.reduced = False

    def launch(self, groups: Sequence[Group]) -> None:
        self.begin()
        self.reopen()
        self.ranks = math.prod(group.size for group in groups)
        self.present.fill_(1.0)
        for n, param in enumerate(self.params):
            if param.grad is None:
                self.views[n].zero_()
                self.present[n] = 0.0
        if len(groups) == 1:
            self.pending = [dist.all_reduce(self.flat, group=groups[0].pg, async_op=True)]
        else:
            for group in groups:
                group.all_reduce(self.flat)

    def land(self) -> None:
        """Wait, and give a gradient to those that had one elsewhere alone."""
        self.wait()
        self.reduced = True
        for n, param in enumerate(self.params):
            if param.grad is None and bool(self.present[n] > 0):
                param.grad = shown_like(param, self.views[n])


class SplitBucket(Bucket):
    """Each rank keeps the sum of its own rows; nothing of full size outlives the reduction."""

    def __init__(self, *args: Any, shard: Group, specs: dict[int, Any], spare: Spare):
        super().__init__(*args)
        self.shard, self.specs, self.spare = shard, specs, spare
        self.each: list[tuple[int, int, int, int]] = []  # rows, width, rows a rank, where in a rank's part
        at = 0
        for param in self.params:
            rows, width = rows_of(local(param).shape)
            per_rank = -(-rows // shard.size)
            self.each.append((rows, width, per_rank, at))
            at += per_rank * width
        self.size = at
        self.own = torch.zeros(0, dtype=self.dtype, device=self.device)  # sums of own rows, over the step's backwards
        self.seen: set[int] = set()
        self.shown = False  # whether own rows stand in the parameters' `.grad`
        self._had: list[bool] = []
        self._input: T | None = None
        self._output: T | None = None

    def take(self, param: Any) -> None:
        self.count(param)

    def launch(self, groups: Sequence[Group]) -> None:
        """Reduce over the shard axis, then what is left over `groups`."""
        self.begin()
        if self.shown:
            self.hide()
        count = self.shard.size
        self._had = [param.grad is not None for param in self.params]
        row = self.size + len(self.params)
        self._input = self.spare.take(count * row, self.dtype, self.device)
        self._output = self.spare.take(row, self.dtype, self.device)
        whole = self._input.view(count, row)
        whole[:, self.size :] = whole.new_tensor(self._had)
        for n, param in enumerate(self.params):
            self._put(whole, n, None if param.grad is None else local(param.grad))
            param.grad = None
        self.pending = [_reduce_scatter(self._output, self._input, self.shard, self.spare)]
        self._others = [group for group in groups if group.size > 1]

    def _put(self, whole: T, n: int, grad: T | None) -> None:
        """A gradient's rows, each rank's where that rank will find them."""
        rows, width, per_rank, at = self.each[n]
        count, part = self.shard.size, whole[:, at : at + per_rank * width]
        if grad is None:
            part.zero_()
            return
        flat = grad.reshape(rows, width)
        if rows == count * per_rank:
            part.copy_(flat.reshape(count, per_rank * width))
            return
        part.zero_()
        for rank in range(count):
            start, stop = even_interval(rows, count, rank)
            if stop > start:
                part[rank, : (stop - start) * width].copy_(flat[start:stop].reshape(-1))

    def land(self) -> None:
        """Wait for what was launched, and add it to the sums."""
        self.wait()
        assert self._input is not None and self._output is not None
        for group in self._others:
            group.all_reduce(self._output)
        values, present = self._output.split([self.size, len(self.params)])
        for n, param in enumerate(self.params):
            if self._had[n] or bool(present[n] > 0):
                self.seen.add(id(param))
        if self.own.numel():
            self.own.add_(values)
        else:
            self.own = values.clone()
        self.spare.give(self._input)
        self.spare.give(self._output)
        self._input = self._output = None

    def rows(self, n: int) -> T:
        """The sums of own rows of a parameter."""
        rows, width, _, at = self.each[n]
        start, stop = even_interval(rows, self.shard.size, self.shard.rank)
        shape = local(self.params[n]).shape
        return self.own[at : at + (stop - start) * width].view(stop - start, *shape[1:])

    def show(self) -> None:
        """Own rows as the parameters' gradients: DTensors over the data axis too."""
        for n, param in enumerate(self.params):
            if id(param) in self.seen:
                value = self.rows(n)
                param.grad = private.wrap(value, private.with_dtype(self.specs[id(param)], value))
        self.shown = True

    def hide(self) -> None:
        """A new backward begins: what is shown goes back behind the sums, or is dropped where the user let go of it."""
        for n, param in enumerate(self.params):
            if id(param) in self.seen and param.grad is None:  # zero_grad
                self.rows(n).zero_()
                self.seen.discard(id(param))
            param.grad = None
        self.shown = False
        if not self.seen:
            self.own = self.own.new_zeros(0)

    def forget(self) -> None:
        """Gradients are gone."""
        self.seen.clear()
        self.shown = False
        self.own = self.own.new_zeros(0)


class Spare:
    """Buffers of a bucket's size that one bucket after another uses, so that a step asks for no memory."""

    def __init__(self) -> None:
        self._free: list[T] = []

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> T:
        """A flat tensor of `count` elements, with any values: the smallest that is free and large enough, or a new one."""
        fitting = [x for x in self._free if x.dtype == dtype and x.device == device and len(x) >= count]
        if not fitting:
            return torch.empty(count, dtype=dtype, device=device)
        best = min(fitting, key=len)
        self._free = [x for x in self._free if x is not best]
        return best[:count]

    def give(self, x: T) -> None:
        """Take back what `take` gave."""
        self._free.append(x if x._base is None else x._base)


def _reduce_scatter(out: T, whole: T, group: Group, spare: Spare) -> Any:
    if group.backend(out.device) != "gloo":
        return group.reduce_scatter_into(out, whole)
    return _ByAllToAll(out, whole, group, spare)


class _ByAllToAll:
    """gloo's reduce_scatter sends as much as its all_reduce; sending each rank its part sends half of that."""

    def __init__(self, out: T, whole: T, group: Group, spare: Spare):
        self.out, self.group, self.spare = out, group, spare
        self.parts = spare.take(len(whole), whole.dtype, whole.device)
        self.work = dist.all_to_all_single(self.parts, whole, group=group.pg, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.parts.view(self.group.size, -1), dim=0, out=self.out)
        self.spare.give(self.parts)
