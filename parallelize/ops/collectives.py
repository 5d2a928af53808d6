"""Collectives with their adjoints: each activation edge of a plan is one autograd Function on plain local tensors.

    copy              x            -> x              backward: sum over ranks
    reduce            partial sums -> their sum      backward: identity
    gather_sequence   [.., S/P, ..] -> [.., S, ..]   backward: reduce-scatter (the gradient is a partial sum)
    scatter_sequence  partial [.., S, ..] -> [.., S/P, ..]   backward: all-gather
    enter_region      [.., S, ..]  -> [.., S/P, ..]  backward: all-gather
    leave_region      [.., S/P, ..] -> [.., S, ..]   backward: own slice (the gradient is whole on every rank)
    gather_last       [.., N/P]    -> [.., N]        backward: own slice
    split_last        [.., N]      -> [.., N/P]      backward: all-gather
    sum_both          partial sums -> their sum      backward: sum over ranks

S is the full sequence length. Where P does not divide it, shards are padded at the end of the sequence to ceil(S/P), so
that every rank holds equally many rows; gathering drops the padding again, and its gradient is zero.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198 (sequence parallelism).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function

from parallelize.errors import ModelError, Problem
from parallelize.groups import Group
from parallelize.layout import even_interval


def refuse_double_backward() -> None:
    """Collectives in backward are invisible to autograd, so a second derivative would miss them.

    Raises: ModelError `double-backward` under `create_graph=True`.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ModelError(
            Problem(
                "double-backward",
                "backward(create_graph=True) reached a collective, which has no second derivative here",
                fix="differentiate once, or leave this module out of the plan",
            )
        )


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        # a copy: autograd may hand the same gradient tensor to another branch
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group.pg)
        return grad, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group.pg)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        return grad, None


class _ReduceOwned(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group.pg)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        return grad, None


class _SumBoth(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group.pg)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group.pg)
        return grad, None


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int, full: int) -> torch.Tensor:
        ctx.args = group, dim
        return gather_dim(x, group, dim, full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        return reduce_scatter_dim(grad, *ctx.args), None, None, None


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.args = group, dim, x.shape[dim]
        return reduce_scatter_dim(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        return gather_dim(grad, *ctx.args), None, None


class _EnterRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.args = group, dim, x.shape[dim]
        return split_dim(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        return gather_dim(grad, *ctx.args), None, None


class _LeaveRegion(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int, full: int) -> torch.Tensor:
        ctx.args = group, dim
        return gather_dim(x, group, dim, full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        return split_dim(grad, *ctx.args), None, None, None


class _GatherLast(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, full: int) -> torch.Tensor:
        ctx.args = group, x.shape[-1], even_interval(full, group.size, group.rank)[0]
        return gather_uneven(x, group, full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        _, size, start = ctx.args
        return grad.narrow(-1, start, size).contiguous(), None, None


class _SplitLast(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, start: int, stop: int) -> torch.Tensor:
        ctx.args = group, x.shape[-1]
        return x.narrow(-1, start, stop - start).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        refuse_double_backward()
        return gather_uneven(grad, *ctx.args), None, None, None


def copy(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Replicated input of sharded work: identity forward, one all-reduce of the gradient backward."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum partial results: one all-reduce forward, identity backward."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def reduce_owned(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`reduce` in place, for a contiguous `x` that the caller has just made and that nobody else reads."""
    return x if group.size == 1 else _ReduceOwned.apply(x, group)


def sum_both(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over ranks of a value that every rank goes on with in its own way: all-reduce forward and backward."""
    return x if group.size == 1 else _SumBoth.apply(x, group)


def gather_sequence(x: torch.Tensor, group: Group, dim: int, full: int) -> torch.Tensor:
    """All-gather along `dim` to `full` rows; backward reduce-scatters the partial gradients."""
    return x if group.size == 1 else _GatherSequence.apply(x, group, dim, full)


def scatter_sequence(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Reduce-scatter partial results along `dim`; backward all-gathers."""
    return x if group.size == 1 else _ScatterSequence.apply(x, group, dim)


def enter_region(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Own rows of a replicated tensor; backward all-gathers."""
    return x if group.size == 1 else _EnterRegion.apply(x, group, dim)


def leave_region(x: torch.Tensor, group: Group, dim: int, full: int) -> torch.Tensor:
    """All-gather along `dim`; backward keeps own rows of the replicated gradient."""
    return x if group.size == 1 else _LeaveRegion.apply(x, group, dim, full)


def gather_last(x: torch.Tensor, group: Group, full: int) -> torch.Tensor:
    """All-gather column shards (cut as `torch.chunk` cuts `full`); backward keeps own columns."""
    return x if group.size == 1 else _GatherLast.apply(x, group, full)


def split_last(x: torch.Tensor, group: Group, start: int, stop: int) -> torch.Tensor:
    """Own columns [start, stop) of a replicated tensor; backward all-gathers."""
    return x if group.size == 1 else _SplitLast.apply(x, group, start, stop)


def gather_dim(x: torch.Tensor, group: Group, dim: int, full: int) -> torch.Tensor:
    """[.., n, ..] on each rank -> contiguous [.., full, ..]; rows beyond `full` are padding, dropped. No autograd."""
    rows = x.shape[dim]
    if dim == 0:
        out = group.all_gather(x.contiguous()).view(group.size * rows, *x.shape[1:])
    else:
        parts = group.all_gather(x.contiguous())
        out = parts.movedim(0, dim).reshape(*x.shape[:dim], group.size * rows, *x.shape[dim + 1 :])
    return out if out.shape[dim] == full else out.narrow(dim, 0, full).contiguous()


def reduce_scatter_dim(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Sum over ranks of [.., S, ..], own ceil(S/P) rows of it, zero-padded at the end. No autograd."""
    parts = _blocks(x, group.size, dim)
    return group.reduce_scatter(parts).view(parts.shape[1:])


def split_dim(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Own ceil(S/P) rows of a replicated [.., S, ..], zero-padded at the end. No autograd."""
    rows = -(-x.shape[dim] // group.size)
    start, stop = even_interval(x.shape[dim], group.size, group.rank)
    own = x.narrow(dim, start, stop - start)
    return own.contiguous() if stop - start == rows else _pad(own, dim, rows).contiguous()


def gather_uneven(x: torch.Tensor, group: Group, full: int) -> torch.Tensor:
    """Column shards as `torch.chunk` cuts them -> all `full` columns. No autograd."""
    rows = -(-full // group.size)
    padded = x if x.shape[-1] == rows else _pad(x, x.ndim - 1, rows)
    return gather_dim(padded, group, x.ndim - 1, full)


def _blocks(x: torch.Tensor, parts: int, dim: int) -> torch.Tensor:
    """[.., S, ..] -> contiguous [parts, .., ceil(S/parts), ..]."""
    rows = -(-x.shape[dim] // parts)
    if x.shape[dim] != rows * parts:
        x = _pad(x, dim, rows * parts)
    return x.unflatten(dim, (parts, rows)).movedim(dim, 0).contiguous()


def _pad(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Zeros at the end of `dim`, up to `size`."""
    after = [0, 0] * (x.ndim - 1 - dim) + [0, size - x.shape[dim]]
    return F.pad(x, after)
