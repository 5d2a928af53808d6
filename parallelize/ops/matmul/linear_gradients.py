"""Gradients of the collective matmuls, and weight gradients that are computed later.

A zero-bubble schedule splits backward in two: input gradients (dgrad), which the previous stage waits for, and weight
gradients (wgrad), which fill the bubble. Inside `with deferred.deferring():` the ops of this package compute the input
gradient and save what the weight gradient needs; `deferred.compute()` then adds it to `.grad`, as backward would have.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from parallelize.comm.groups import Group
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.library import LIBRARY, NAMESPACE
from parallelize.ops.matmul.matmul_ops import weight_gradient
from parallelize.ops.matmul.row_chunks import flat, gather_rows

T = torch.Tensor
_ops = torch.ops.parallelize
_LOCAL = threading.local()


class DeferredGradients:
    """Weight gradients that are computed later, in the order in which backward reached them.

    Pass it as `deferred=` to the overlapped linears; a copy of it is empty. `len()` is the number of pending gradients.
    """

    def __init__(self) -> None:
        self.active = False
        self._pending: list[tuple[T, Callable[[], T]]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredGradients:
        return DeferredGradients()

    @contextmanager
    def deferring(self) -> Iterator[DeferredGradients]:
        """Backward passes inside the block compute input gradients only."""
        before, self.active = self.active, True
        try:
            yield self
        finally:
            self.active = before

    def compute(self, most: int | None = None) -> None:
        """Compute pending weight gradients and add them to the weights' `.grad`.

        Args:
            most: how many, oldest first. Default: all.

        Cost: none, or one all-gather for each gradient of an `all_gather_linear` with `save="shard"`.
        """
        number = len(self._pending) if most is None else most
        due, self._pending = self._pending[:number], self._pending[number:]
        with torch.no_grad():
            for weight, compute in due:
                accumulate(weight, compute())

    def takes(self, weight: T) -> bool:
        """Whether the gradient of this weight is deferred now."""
        return self.active and weight.is_leaf and weight.requires_grad

    def add(self, weight: T, compute: Callable[[], T]) -> None:
        """Save the function `compute`, which returns the gradient of `weight`, for a later `compute()`."""
        self._pending.append((weight, compute))


def accumulate(leaf: T, grad: T) -> None:
    """Do what autograd does when a leaf's gradient arrives, including its hooks."""
    for hook in list((leaf._backward_hooks or {}).values()):
        replacement: Any = hook(grad)
        grad = grad if replacement is None else replacement
    leaf.grad = grad if leaf.grad is None else leaf.grad.add_(grad)
    hooks: Any = leaf._post_accumulate_grad_hooks
    for hook in list((hooks or {}).values()):
        hook(leaf)


@contextmanager
def deferral(deferred: DeferredGradients | None) -> Iterator[None]:
    """Ops that are called inside the block defer their weight gradients to `deferred` while it is active."""
    _LOCAL.deferred = deferred
    try:
        yield
    finally:
        _LOCAL.deferred = None


def _deferred() -> DeferredGradients | None:
    return getattr(_LOCAL, "deferred", None)


def _cast(dx: T, dtype: torch.dtype) -> T:
    return dx if dx.dtype == dtype else dx.to(dtype)


def _reference_leaves(ctx: Any, weights: list[T]) -> None:
    """Reference the weights themselves if their gradients may be deferred: saved-tensor hooks return copies."""
    ctx.deferred = _deferred()
    ctx.leaves = weights if ctx.deferred is not None else []


class _WgradSplit:
    """Which weight gradients are computed now, and which are deferred.

    Args:
        used: indices of the weights whose outputs have a gradient.
        needed: whether the gradient of each weight is needed, for all weights.
    """

    def __init__(self, ctx: Any, used: list[int], needed: list[bool]):
        deferred = ctx.deferred
        self.later = [needed[n] and deferred is not None and deferred.takes(ctx.leaves[n]) for n in used]
        self.now = [needed[n] and not later for n, later in zip(used, self.later, strict=True)]


class _UsedOutputs:
    """The outputs of column linears that have a gradient, and where the gradients of their parameters go.

    Args:
        grads: the gradient of every output; None for an output that is not used.
        weights: the weight of every output.
    """

    def __init__(self, ctx: Any, grads: list[T | None], weights: list[T]):
        _, self.need_weights, self.need_biases = ctx.needs
        self.ctx, self.number = ctx, len(weights)
        used = [(n, grad) for n, grad in enumerate(grads) if grad is not None]
        self.indices = [n for n, _ in used]
        self.grads = [grad.contiguous() for _, grad in used]
        self.weights = [weights[n] for n in self.indices]
        self.split = _WgradSplit(ctx, self.indices, self.need_weights)

    def parameter_gradients(
        self, computed: list[T], rows: T, gather: Any = None
    ) -> tuple[list[T | None], list[T | None]]:
        """(weight gradients, bias gradients) by output; deferred gradients are registered.

        Args:
            computed: the weight gradients that are not deferred.
            rows: what deferred gradients are computed from.
            gather: the autograd ctx with the dim, size and group of the all-gather of `rows`; None if `rows` are
                gathered.
        """
        rest = iter(computed)
        weights: list[T | None] = [None] * self.number
        biases: list[T | None] = [None] * len(self.need_biases)
        for position, n in enumerate(self.indices):
            grad, weight = self.grads[position], self.weights[position]
            if self.split.now[position]:
                weights[n] = next(rest)
            if self.split.later[position]:
                self.ctx.deferred.add(self.ctx.leaves[n], _weight_gradient_later(grad, rows, weight, gather))
            if self.need_biases and self.need_biases[n]:
                biases[n] = flat(grad).sum(0)
        return weights, biases


# -- all_gather_linear -------------------------------------------------------------------------------------------------


def _save_gather(ctx: Any, inputs: tuple[Any, ...], output: list[T]) -> None:
    x, weights, biases, ctx.dim, ctx.full, ctx.group, ctx.algorithm, ctx.keep = inputs
    ctx.set_materialize_grads(False)
    ctx.x_dtype = x.dtype
    _reference_leaves(ctx, weights)
    ctx.needs = x.requires_grad, [w.requires_grad for w in weights], [b.requires_grad for b in biases]
    trains = any(ctx.needs[1])
    ctx.save_for_backward((output[-1] if ctx.keep else x) if trains else x, *weights)


def _gather_backward(ctx: Any, grads: list[T | None]) -> tuple[Any, ...]:
    refuse_double_backward()
    *outs, other = grads
    need_x, need_weights, need_biases = ctx.needs
    if all(grad is None for grad in outs):  # no output is used, and the saved tensors may have been written to
        return _gathered_only(ctx, other), [None] * len(need_weights), [None] * len(need_biases), *[None] * 5
    rows, *weights = ctx.saved_tensors
    columns, gathered = _UsedOutputs(ctx, outs, weights), ctx.keep and any(need_weights)
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
        ctx.algorithm,
    )
    dx = results.pop(0) if need_x else None
    dx = None if dx is None else _cast(dx, ctx.x_dtype)
    return dx, *columns.parameter_gradients(results, rows, None if gathered else ctx), *[None] * 5


def _gathered_only(ctx: Any, other: T | None) -> T | None:
    """The input gradient if only the gathered rows are used."""
    if other is None or not ctx.needs[0]:
        return None
    options = (ctx.dim, ctx.full, ctx.group, ctx.algorithm)
    (dx,) = _ops.all_gather_linear_backward([], other, other, [], True, True, [], *options)
    return _cast(dx, ctx.x_dtype)


def _weight_gradient_later(grad: T, rows: T, weight: T, gather: Any = None) -> Callable[[], T]:
    """A function that computes a weight gradient.

    If `gather` is the ctx of an all-gather, the function gathers `rows` first.
    """

    def compute() -> T:
        full_rows = rows
        if gather is not None:
            full_rows = gather_rows(rows, gather.dim, gather.full, Group.by_key(gather.group))
        out = torch.empty_like(weight)
        weight_gradient(grad, full_rows, out)
        return out

    return compute


# -- linear_reduce_scatter ---------------------------------------------------------------------------------------------


def _save_scatter(ctx: Any, inputs: tuple[Any, ...], output: T) -> None:
    x, weight, ctx.dim, ctx.group, ctx.algorithm = inputs
    _reference_leaves(ctx, [weight])
    ctx.needs = x.requires_grad, weight.requires_grad
    ctx.save_for_backward(x, weight)


def _scatter_backward(ctx: Any, grad: T) -> tuple[Any, ...]:
    refuse_double_backward()
    x, weight = ctx.saved_tensors
    need_x, need_weight = ctx.needs
    split = _WgradSplit(ctx, [0], [need_weight])
    results = _ops.linear_reduce_scatter_backward(
        grad.contiguous(), x, weight, need_x, split.now[0], ctx.dim, ctx.group, ctx.algorithm
    )
    if split.later[0]:
        ctx.deferred.add(ctx.leaves[0], _weight_gradient_later(results[-1], x, weight))
    dx = _cast(results[0], x.dtype) if need_x else None
    return dx, results[int(need_x)] if split.now[0] else None, None, None, None


# -- linear_all_reduce -------------------------------------------------------------------------------------------------


def _save_reduce(ctx: Any, inputs: tuple[Any, ...], output: T) -> None:
    x, weight, _, _ = inputs
    _reference_leaves(ctx, [weight])
    ctx.needs = x.requires_grad, weight.requires_grad
    ctx.save_for_backward(x, weight)


def _reduce_backward(ctx: Any, grad: T) -> tuple[Any, ...]:
    """No communication: every rank has the full gradient of the sum."""
    refuse_double_backward()
    x, weight = ctx.saved_tensors
    need_x, need_weight = ctx.needs
    split = _WgradSplit(ctx, [0], [need_weight])
    dx = _cast(grad @ weight, x.dtype) if need_x else None
    dw = None
    if split.now[0]:
        dw = flat(grad).t() @ flat(x).to(grad.dtype)
    if split.later[0]:
        ctx.deferred.add(ctx.leaves[0], _weight_gradient_later(grad, x, weight))
    return dx, dw, None, None


# -- column_linear -----------------------------------------------------------------------------------------------------


def _save_column(ctx: Any, inputs: tuple[Any, ...], output: list[T]) -> None:
    x, weights, biases, ctx.group, ctx.algorithm = inputs
    ctx.set_materialize_grads(False)
    _reference_leaves(ctx, weights)
    ctx.needs = x.requires_grad, [w.requires_grad for w in weights], [b.requires_grad for b in biases]
    ctx.save_for_backward(x, *weights)


def _column_backward(ctx: Any, grads: list[T | None]) -> tuple[Any, ...]:
    refuse_double_backward()
    x, *weights = ctx.saved_tensors
    columns, dx = _UsedOutputs(ctx, grads, weights), None
    now = columns.split.now
    if ctx.needs[0] and columns.indices:
        dx, *computed = _ops.column_linear_backward(columns.grads, x, columns.weights, now, ctx.group, ctx.algorithm)
        dx = _cast(dx, x.dtype)
    else:
        pairs = zip(columns.grads, columns.weights, now, strict=True)
        computed = [_weight_gradient_later(grad, x, weight)() for grad, weight, needed in pairs if needed]
    return dx, *columns.parameter_gradients(computed, x), None, None


for _name, _formula, _setup in (
    ("all_gather_linear", _gather_backward, _save_gather),
    ("linear_reduce_scatter", _scatter_backward, _save_scatter),
    ("linear_all_reduce", _reduce_backward, _save_reduce),
    ("column_linear", _column_backward, _save_column),
):
    torch.library.register_autograd(f"{NAMESPACE}::{_name}", _formula, setup_context=_setup, lib=LIBRARY)
