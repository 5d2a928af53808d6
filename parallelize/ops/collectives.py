"""Collectives with their adjoints: each boundary conversion of a plan is one autograd Function on plain local tensors.

    copy            x            -> x              backward: sum over ranks
    reduce          partial sums -> their sum      backward: identity
    sum_both        partial sums -> their sum      backward: sum over ranks
    gather          [.., s, ..]  -> [.., S, ..]    backward: reduce-scatter or local rows, by the gradient's placement
    reduce_scatter  partial [.., S, ..] -> [.., s, ..]   backward: all-gather
    split           [.., S, ..]  -> [.., s, ..]    backward: all-gather
    all_to_all      [.., S, .., t, ..] -> [.., s, .., T, ..]   backward: the reverse

S is the full size of any dim and s this rank's shard of it, as `torch.chunk` splits it: the last shards may be smaller
or empty. `padded` shards have ceil(S/P) rows on every rank, with zeros at the end; `gather` takes either. No input is
changed, and on a group of one rank every function is the identity.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198 (sequence parallelism);
Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509 (all-to-all).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import even_interval
from parallelize.base.torch_private.torch_dynamo import function_of
from parallelize.comm import blocking
from parallelize.comm.groups import Group
from parallelize.ops import replay_cache


def refuse_double_backward() -> None:
    """Refuse a second derivative, which would be wrong: autograd does not record the collectives in backward.

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
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_double_backward()
        # a copy: autograd may pass the same gradient tensor to another branch
        grad = grad.clone(memory_format=torch.contiguous_format)
        blocking.all_reduce(grad, ctx.group.pg)
        return grad, None


class _CopyToRead(_Copy):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.detach()  # no view, so that it does not keep `x` alive


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return replay_cache.run_collective("all_reduce", _sum, x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_double_backward()
        return grad, None


class _ReduceOwned(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.mark_dirty(x)
        blocking.all_reduce(x, group.pg)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_double_backward()
        return grad, None


class _SumBoth(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return replay_cache.run_collective("all_reduce", _sum, x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_double_backward()
        grad = grad.clone(memory_format=torch.contiguous_format)
        blocking.all_reduce(grad, ctx.group.pg)
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int, full: int, partial: bool) -> torch.Tensor:
        ctx.args = group, dim, x.shape[dim], partial
        rows = -(-full // group.size)
        padded = x if x.shape[dim] == rows else pad_to(x, dim, rows)
        return replay_cache.run_collective("all_gather", gather_dim, padded, group, dim, full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_double_backward()
        group, dim, rows, partial = ctx.args
        local = reduce_scatter_dim(grad, group, dim) if partial else split_dim(grad, group, dim)
        return local if local.shape[dim] == rows else local.narrow(dim, 0, rows), None, None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int, padded: bool) -> torch.Tensor:
        ctx.args = group, dim, x.shape[dim]
        local = replay_cache.run_collective("reduce_scatter", reduce_scatter_dim, x, group, dim)
        return local if padded else _unpadded(local, group, dim, x.shape[dim])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_double_backward()
        return gather_uneven(grad, *ctx.args), None, None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int, padded: bool) -> torch.Tensor:
        ctx.args = group, dim, x.shape[dim]
        local = split_dim(x, group, dim)
        return local if padded else _unpadded(local, group, dim, x.shape[dim])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_double_backward()
        return gather_uneven(grad, *ctx.args), None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, split: int, concat: int, full: int) -> torch.Tensor:
        ctx.args = group, concat, split, x.shape[split]
        return replay_cache.run_collective("all_to_all", exchange_dims, x, group, split, concat, full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        refuse_double_backward()
        return exchange_dims(grad, *ctx.args), None, None, None, None


_copy, _copy_to_read, _split = function_of(_Copy), function_of(_CopyToRead), function_of(_Split)
_reduce, _reduce_owned, _sum_both = function_of(_Reduce), function_of(_ReduceOwned), function_of(_SumBoth)
_gather, _reduce_scatter, _all_to_all = function_of(_Gather), function_of(_ReduceScatter), function_of(_AllToAll)


def copy(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Pass a replicated input to a sharded computation: identity forward, one all-reduce of the gradient backward."""
    return x if group.size == 1 else _copy(x, group)


def copy_to_read(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`copy` for callers that do not write to the result, which shares the data of `x` but is not a view of it."""
    return x if group.size == 1 else _copy_to_read(x, group)


def reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum partial results: one all-reduce forward, identity backward."""
    return x if group.size == 1 else _reduce(x, group)


def reduce_owned(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`reduce` in place, for a contiguous `x` that was just computed and has no other reader."""
    if group.size == 1:
        return x
    return _reduce_owned(x, group) if replay_cache.may_overwrite() else _reduce(x, group)


def sum_both(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over ranks of a value that each rank then uses differently: one all-reduce forward, one backward."""
    return x if group.size == 1 else _sum_both(x, group)


def gather(x: torch.Tensor, group: Group, dim: int, full: int, gradient: str) -> torch.Tensor:
    """All-gather along `dim`.

    Args:
        x: this rank's shard of `full` rows, or the same padded to ceil(full/P) rows.
        gradient: the placement of the output's gradient. "partial": each rank has one part of the sum, and backward is
            a reduce-scatter. "replicate": every rank has the full gradient, and backward keeps the local rows of it.
    """
    if group.size == 1:
        return x
    return _gather(x, group, dim % x.ndim, full, _PARTIAL[gradient])


_PARTIAL = {"partial": True, "replicate": False}


def reduce_scatter(x: torch.Tensor, group: Group, dim: int, padded: bool = False) -> torch.Tensor:
    """Sum partial results over ranks and keep the local rows; backward all-gathers."""
    return x if group.size == 1 else _reduce_scatter(x, group, dim % x.ndim, padded)


def split(x: torch.Tensor, group: Group, dim: int, padded: bool = False) -> torch.Tensor:
    """The local rows of a replicated tensor; backward all-gathers."""
    return x if group.size == 1 else _split(x, group, dim % x.ndim, padded)


def all_to_all(x: torch.Tensor, group: Group, split: int, concat: int, full: int) -> torch.Tensor:
    """Exchange a shard of dim `concat` for a shard of dim `split`; backward exchanges them back.

    Args:
        x: all of dim `split`, this rank's shard of dim `concat`.
        full: size of dim `concat` over all ranks.

    Returns: this rank's shard of dim `split`, all of dim `concat`.
    """
    if group.size == 1:
        return x
    return _all_to_all(x, group, split % x.ndim, concat % x.ndim, full)


def _sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over ranks, in a new tensor. No autograd."""
    out = x.clone(memory_format=torch.contiguous_format)
    blocking.all_reduce(out, group.pg)
    return out


def gather_dim(x: torch.Tensor, group: Group, dim: int, full: int) -> torch.Tensor:
    """[.., n, ..] on each rank -> contiguous [.., full, ..], without the padding beyond `full`. No autograd."""
    rows = x.shape[dim]
    if dim == 0:
        out = group.all_gather(x.contiguous()).view(group.size * rows, *x.shape[1:])
    else:
        shards = group.all_gather(x.contiguous())
        out = shards.movedim(0, dim).reshape(*x.shape[:dim], group.size * rows, *x.shape[dim + 1 :])
        out = out.contiguous()  # with one row per rank the reshape is a view
    return out if out.shape[dim] == full else out.narrow(dim, 0, full).contiguous()


def reduce_scatter_dim(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Sum [.., S, ..] over ranks; returns this rank's ceil(S/P) rows, zero-padded at the end. No autograd."""
    shards = _padded_shards(x, group.size, dim)
    return group.reduce_scatter(shards.flatten(0, 1))  # no view, so that the model may write to it


def split_dim(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's ceil(S/P) rows of a replicated [.., S, ..], zero-padded at the end. No autograd."""
    rows = -(-x.shape[dim] // group.size)
    start, stop = even_interval(x.shape[dim], group.size, group.rank)
    local = x.narrow(dim, start, stop - start)
    return local.contiguous() if stop - start == rows else pad_to(local, dim, rows).contiguous()


def gather_uneven(x: torch.Tensor, group: Group, dim: int, full: int) -> torch.Tensor:
    """Shards as `torch.chunk` splits them, padded or not -> all `full` rows. No autograd."""
    rows = -(-full // group.size)
    return gather_dim(x if x.shape[dim] == rows else pad_to(x, dim, rows), group, dim, full)


def exchange_dims(x: torch.Tensor, group: Group, split: int, concat: int, full: int) -> torch.Tensor:
    """`all_to_all` without autograd."""
    intervals = [even_interval(x.shape[split], group.size, rank) for rank in range(group.size)]
    sent = [x.narrow(split, start, stop - start).reshape(-1) for start, stop in intervals]
    local = intervals[group.rank][1] - intervals[group.rank][0]
    shapes = []
    for rank in range(group.size):
        start, stop = even_interval(full, group.size, rank)
        shape = list(x.shape)
        shape[split], shape[concat] = local, stop - start
        shapes.append(shape)
    received = group.all_to_all(torch.cat(sent), [chunk.numel() for chunk in sent], [prod(shape) for shape in shapes])
    chunks = received.split([prod(shape) for shape in shapes])
    return torch.cat([chunk.view(shape) for chunk, shape in zip(chunks, shapes, strict=True)], concat)


def _unpadded(local: torch.Tensor, group: Group, dim: int, full: int) -> torch.Tensor:
    start, stop = even_interval(full, group.size, group.rank)
    return local if local.shape[dim] == stop - start else local.narrow(dim, 0, stop - start).contiguous()


def _padded_shards(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """[.., S, ..] -> contiguous [size, .., ceil(S/size), ..]."""
    rows = -(-x.shape[dim] // size)
    if x.shape[dim] != rows * size:
        x = pad_to(x, dim, rows * size)
    return x.view(*x.shape[:dim], size, rows, *x.shape[dim + 1 :]).movedim(dim, 0).contiguous()


def pad_to(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Append zeros along `dim`, up to `size`."""
    after = [0, 0] * (x.ndim - 1 - dim) + [0, size - x.shape[dim]]
    return F.pad(x, after)
