"""Gradients of the collective matmuls, and weight gradients that are computed later.

A zero-bubble schedule splits backward in two: input gradients, which the stage before waits for, and weight gradients,
which fill the idle time. Inside `with deferred.deferring():` the ops of this package give the input gradient and keep
what the weight gradient needs; `deferred.compute()` then adds it to `.grad`, as backward would have.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from parallelize.groups import Group
from parallelize.ops import pipeline
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.library import LIBRARY, NAMESPACE
from parallelize.ops.linears import weight_gradient
from parallelize.ops.shards import flat

T = torch.Tensor
_ops = torch.ops.parallelize
_LOCAL = threading.local()


class DeferredGradients:
    """Weight gradients to be computed later, in the order in which backward came by them."""

    def __init__(self) -> None:
        self.active = False
        self._pending: list[tuple[T, Callable[[], T]]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def __deepcopy__(self, memo: dict) -> DeferredGradients:
        return DeferredGradients()

    @contextmanager
    def deferring(self) -> Iterator[DeferredGradients]:
        """Backward passes inside give input gradients only."""
        kept, self.active = self.active, True
        try:
            yield self
        finally:
            self.active = kept

    def compute(self, most: int | None = None) -> None:
        """Add all that is pending (or the oldest `most`) to the weights' `.grad`."""
        number = len(self._pending) if most is None else most
        now, self._pending = self._pending[:number], self._pending[number:]
        with torch.no_grad():
            for weight, work in now:
                accumulate(weight, work())

    def takes(self, weight: T) -> bool:
        return self.active and weight.is_leaf and weight.requires_grad

    def add(self, weight: T, work: Callable[[], T]) -> None:
        self._pending.append((weight, work))


def accumulate(leaf: T, grad: T) -> None:
    """What autograd does when a leaf's gradient arrives, its hooks included."""
    for hook in list((leaf._backward_hooks or {}).values()):
        changed: Any = hook(grad)
        grad = grad if changed is None else changed
    leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)
    hooks: Any = leaf._post_accumulate_grad_hooks
    for hook in list((hooks or {}).values()):
        hook(leaf)


@contextmanager
def deferral(deferred: DeferredGradients | None) -> Iterator[None]:
    """Ops called inside hand their weight gradients to `deferred` while it is active."""
    _LOCAL.deferred = deferred
    try:
        yield
    finally:
        _LOCAL.deferred = None


def _deferred() -> DeferredGradients | None:
    return getattr(_LOCAL, "deferred", None)


def _matched(dx: T, x: T) -> T:
    return dx if dx.dtype == x.dtype else dx.to(x.dtype)


def _keep_leaves(ctx: Any, weights: list[T]) -> None:
    """The weights themselves, where their gradients may wait: hooks on saved tensors (recompute, offloading) give copies."""
    ctx.deferred = _deferred()
    ctx.leaves = weights if ctx.deferred is not None else []


class _Split:
    """Which weight gradients are computed now, and which later.

    Args:
        which: places of weights whose outputs have a gradient. wanted: whether each of all weights needs one.
    """

    def __init__(self, ctx: Any, which: list[int], wanted: list[bool]):
        deferred = ctx.deferred
        self.later = [wanted[n] and deferred is not None and deferred.takes(ctx.leaves[n]) for n in which]
        self.now = [wanted[n] and not later for n, later in zip(which, self.later, strict=True)]


class _Columns:
    """The outputs of column linears that have a gradient, and where the gradients of their parameters go.

    Args:
        grads: of every output, None where nobody used it. weights: of every output.
    """

    def __init__(self, ctx: Any, grads: list[T | None], weights: list[T]):
        _, self.need_weights, self.need_biases = ctx.needs
        self.ctx, self.number = ctx, len(weights)
        self.used = [n for n, grad in enumerate(grads) if grad is not None]
        self.grads = [grads[n].contiguous() for n in self.used]  # type: ignore[union-attr]
        self.weights = [weights[n] for n in self.used]
        self.split = _Split(ctx, self.used, self.need_weights)

    def spread(self, computed: list[T], rows: T, gather: Any = None) -> tuple[list[T | None], list[T | None]]:
        """(weight gradients, bias gradients) by place; what waits is handed over.

        Args:
            computed: the weight gradients that are wanted now. rows: what the others are made of later, gathered before
            if `gather` tells how.
        """
        rest = iter(computed)
        weights: list[T | None] = [None] * self.number
        biases: list[T | None] = [None] * len(self.need_biases)
        for place, n in enumerate(self.used):
            if self.split.now[place]:
                weights[n] = next(rest)
            if self.split.later[place]:
                self.ctx.deferred.add(self.ctx.leaves[n], _later(self.grads[place], rows, self.weights[place], gather))
            if self.need_biases and self.need_biases[n]:
                biases[n] = flat(self.grads[place]).sum(0)
        return weights, biases


# -- all_gather_linear --------------------------------------------------------------------------------------------------


def _save_gather(ctx: Any, inputs: tuple, output: list[T]) -> None:
    x, weights, biases, ctx.dim, ctx.full, ctx.group, ctx.way, ctx.keep = inputs
    ctx.set_materialize_grads(False)
    ctx.x_dtype = x.dtype
    _keep_leaves(ctx, weights)
    ctx.needs = x.requires_grad, [w.requires_grad for w in weights], [b.requires_grad for b in biases]
    trains = any(ctx.needs[1])
    ctx.save_for_backward((output[-1] if ctx.keep else x) if trains else x, *weights)


def _gather_backward(ctx: Any, grads: list[T | None]):
    refuse_double_backward()
    *outs, other = grads
    need_x, need_weights, need_biases = ctx.needs
    if all(grad is None for grad in outs):  # nobody took a product: what was saved may have been written to since
        return _gathered_only(ctx, other), [None] * len(need_weights), [None] * len(need_biases), *[None] * 5
    rows, *weights = ctx.saved_tensors
    columns, gathered = _Columns(ctx, outs, weights), ctx.keep and any(need_weights)
    results = _ops.all_gather_linear_backward(
        columns.grads,
        other,
        rows,
        columns.weights,
        gathered,
        need_x,
        columns.split.now,
        ctx.dim,
        ctx.full,
        ctx.group,
        ctx.way,
    )
    dx = results.pop(0) if need_x else None
    dx = dx if dx is None or dx.dtype == ctx.x_dtype else dx.to(ctx.x_dtype)
    return dx, *columns.spread(results, rows, None if gathered else ctx), *[None] * 5


def _gathered_only(ctx: Any, other: T | None) -> T | None:
    """The input gradient where only the gathered rows were used."""
    if other is None or not ctx.needs[0]:
        return None
    place = (ctx.dim, ctx.full, ctx.group, ctx.way)
    (dx,) = _ops.all_gather_linear_backward([], other, other, [], True, True, [], *place)
    return dx if dx.dtype == ctx.x_dtype else dx.to(ctx.x_dtype)


def _later(grad: T, rows: T, weight: T, gather: Any) -> Callable[[], T]:
    def compute() -> T:
        whole = (
            rows if gather is None else pipeline.gather_rows(rows, gather.dim, gather.full, Group.by_key(gather.group))
        )
        out = torch.empty_like(weight)
        weight_gradient(grad, whole, out)
        return out

    return compute


# -- linear_reduce_scatter ----------------------------------------------------------------------------------------------


def _save_scatter(ctx: Any, inputs: tuple, output: T) -> None:
    x, weight, ctx.dim, ctx.group, ctx.way = inputs
    _keep_leaves(ctx, [weight])
    ctx.needs = x.requires_grad, weight.requires_grad
    ctx.save_for_backward(x, weight)


def _scatter_backward(ctx: Any, grad: T):
    refuse_double_backward()
    x, weight = ctx.saved_tensors
    need_x, need_weight = ctx.needs
    split = _Split(ctx, [0], [need_weight])
    results = _ops.linear_reduce_scatter_backward(
        grad.contiguous(), x, weight, need_x, split.now[0], ctx.dim, ctx.group, ctx.way
    )
    if split.later[0]:
        ctx.deferred.add(ctx.leaves[0], _later(results[-1], x, weight, None))
    dx = _matched(results[0], x) if need_x else None
    return dx, results[int(need_x)] if split.now[0] else None, None, None, None


# -- linear_all_reduce --------------------------------------------------------------------------------------------------


def _save_reduce(ctx: Any, inputs: tuple, output: T) -> None:
    x, weight, _, _ = inputs
    _keep_leaves(ctx, [weight])
    ctx.needs = x.requires_grad, weight.requires_grad
    ctx.save_for_backward(x, weight)


def _reduce_backward(ctx: Any, grad: T):
    """Nothing to send: the gradient of a sum is whole on every rank."""
    refuse_double_backward()
    x, weight = ctx.saved_tensors
    need_x, need_weight = ctx.needs
    split = _Split(ctx, [0], [need_weight])
    dx = _matched(grad @ weight, x) if need_x else None
    dw = None
    if split.now[0]:
        dw = flat(grad).t() @ flat(x).to(grad.dtype)
    if split.later[0]:
        ctx.deferred.add(ctx.leaves[0], _later(grad, x, weight, None))
    return dx, dw, None, None


# -- column_linear ------------------------------------------------------------------------------------------------------


def _save_column(ctx: Any, inputs: tuple, output: list[T]) -> None:
    x, weights, biases, ctx.group, ctx.way = inputs
    ctx.set_materialize_grads(False)
    _keep_leaves(ctx, weights)
    ctx.needs = x.requires_grad, [w.requires_grad for w in weights], [b.requires_grad for b in biases]
    ctx.save_for_backward(x, *weights)


def _column_backward(ctx: Any, grads: list[T | None]):
    refuse_double_backward()
    x, *weights = ctx.saved_tensors
    columns, dx = _Columns(ctx, grads, weights), None
    now = columns.split.now
    if ctx.needs[0] and columns.used:
        dx, *computed = _ops.column_linear_backward(columns.grads, x, columns.weights, now, ctx.group, ctx.way)
        dx = _matched(dx, x)
    else:
        pairs = zip(columns.grads, columns.weights, now, strict=True)
        computed = [_later(grad, x, weight, None)() for grad, weight, wanted in pairs if wanted]
    return dx, *columns.spread(computed, x), None, None


for _name, _formula, _setup in (
    ("all_gather_linear", _gather_backward, _save_gather),
    ("linear_reduce_scatter", _scatter_backward, _save_scatter),
    ("linear_all_reduce", _reduce_backward, _save_reduce),
    ("column_linear", _column_backward, _save_column),
):
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", _formula, setup_context=_setup, lib=LIBRARY)
