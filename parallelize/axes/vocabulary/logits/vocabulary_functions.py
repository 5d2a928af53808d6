"""Functions over the vocabulary, as losses of one process write them: each is right on shards, with its gradient.

    log_softmax, softmax        of the vocabulary: a shard of the result
    logsumexp, sum, mean        over the vocabulary, or over everything: the result, on every rank
    gather                      from the vocabulary: the values, on every rank
    F.kl_div                    of two shards, or of a shard and a full tensor: the reductions count all entries

A result on every rank passes its gradient to each rank's shard as it is: every rank computes the same loss. Over other
dims these functions run on the local tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from parallelize.axes.vocabulary.logits.row_functions import local_tensor, refuse, refuse_layouts, same_layout
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.ops.vocabulary.class_targets import check_ids, local_ids
from parallelize.ops.vocabulary.divergence import combined_totals, normalized, row_totals
from parallelize.ops.vocabulary.softmax import working_dtype
from parallelize.state.guards.rank_means import marked_mean

T = torch.Tensor


class _Normalizer(Function):
    """(largest logit M, log sum exp(z - M)) of local logits z [..., V/P], over all ranks.

    Only the second has a gradient, that of their sum: M stands for a number that is subtracted and added again.
    """

    @staticmethod
    def forward(ctx: Any, z: T, group: Group) -> tuple[T, T]:
        flat = z.reshape(-1, z.shape[-1]) if z.shape[-1] else z.new_empty(z.shape[:-1].numel(), 0)
        highest, log_total = combined_totals(row_totals(flat.to(working_dtype(z))), group)
        highest, log_total = (value.view(z.shape[:-1]) for value in (highest, log_total))
        ctx.save_for_backward(z, highest, log_total)
        ctx.mark_non_differentiable(highest)
        return highest, log_total

    @staticmethod
    def backward(ctx: Any, _: T, grad: T) -> tuple[T, None]:
        ops.refuse_double_backward()
        z, highest, log_total = ctx.saved_tensors
        out = normalized(z.to(working_dtype(z), copy=True), highest, log_total).exp_().mul_(grad.unsqueeze(-1))
        return out.to(z.dtype), None


def _softmax(func: Callable, args: tuple, kwargs: dict) -> T:
    """`softmax` or `log_softmax`, in float32 at least, rounded once as PyTorch does."""
    logits, local = args[0], local_tensor(args[0])
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is None:
        refuse(f"{func.__name__} without a dim")
    if dim % local.ndim != local.ndim - 1:
        return logits.with_local(func(local, *args[1:], **kwargs))
    dtype = func(local.new_zeros((1,) * local.ndim), *args[1:], **kwargs).dtype  # of an argument, or of autocast
    local = local.to(torch.promote_types(dtype, working_dtype(local)) if local.is_floating_point() else dtype)
    highest, log_total = _Normalizer.apply(local, logits.vocabulary.group)
    log_total = ops.copy(log_total, logits.vocabulary.group)
    out = (local - highest.unsqueeze(-1)) - log_total.unsqueeze(-1)
    return logits.with_local((out if "log" in func.__name__ else out.exp()).to(dtype))


def _logsumexp(func: Callable, args: tuple, kwargs: dict) -> T:
    arguments = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    logits, local, keepdim = args[0], local_tensor(args[0]), arguments.get("keepdim", False)
    dims = _dims(arguments.get("dim"), local.ndim)
    if local.ndim - 1 not in dims:
        return logits.with_local(func(local, *args[1:], **kwargs))
    highest, log_total = _Normalizer.apply(local, logits.vocabulary.group)
    out = (highest + log_total).unsqueeze(-1)
    others = [dim for dim in dims if dim != local.ndim - 1]
    if others:
        out = out.logsumexp(others, keepdim=True)
    out = out.to(local.dtype)
    return out if keepdim else out.squeeze(dims)


def _total(func: Callable, args: tuple, kwargs: dict) -> T:
    """`sum` or `mean`, in float32 at least."""
    arguments = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    logits, local = args[0], local_tensor(args[0])
    dims, keepdim = _dims(arguments.get("dim"), local.ndim), arguments.get("keepdim", False)
    if set(arguments) - {"input", "dim", "keepdim", "dtype"}:
        refuse(f"{func.__name__} with {', '.join(sorted(set(arguments) - {'input', 'dim', 'keepdim', 'dtype'}))}")
    if local.ndim - 1 not in dims:
        return logits.with_local(func(local, *args[1:], **kwargs))
    dtype = func(local.new_zeros((1,) * local.ndim), *args[1:], **kwargs).dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    out = ops.reduce(local.sum(dims, keepdim, dtype=wide), logits.vocabulary.group)
    if func in _MEANS:
        sizes = logits.shape
        for dim in dims:
            out = out / sizes[dim]
    return out.to(dtype)


def _dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims that a reduction is over; None or none are all."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    return tuple(axis % ndim for axis in (dim if isinstance(dim, (tuple, list)) else (dim,)))


def _gather(func: Callable, args: tuple, kwargs: dict) -> T:
    """Values at ids of the full vocabulary: each is on one rank, and the others add 0."""
    arguments = dict(zip(("input", "dim", "index"), args, strict=False)) | kwargs
    logits, index, local = args[0], arguments["index"], local_tensor(args[0])
    if arguments["dim"] % local.ndim != local.ndim - 1 or arguments.get("sparse_grad"):
        refuse(f"{func.__name__} along another dim than the vocabulary, or with a sparse gradient")
    vocabulary = logits.vocabulary
    check_ids(index, vocabulary.full, "indices")
    ids, outside = local_ids(index, vocabulary.start, vocabulary.stop)
    if local.shape[-1]:
        values = local.gather(-1, ids).masked_fill(outside, 0.0)
    else:  # more ranks than entries; the sum keeps it in the graph
        values = local.sum(-1, keepdim=True)[tuple(slice(size) for size in index.shape[:-1])].expand(index.shape)
    return ops.reduce(values, vocabulary.group)


def _kl_div(func: Callable, args: tuple, kwargs: dict) -> T:
    names = ("input", "target", "size_average", "reduce", "reduction", "log_target")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    if arguments.pop("size_average", None) is not None or arguments.pop("reduce", None) is not None:
        refuse("kl_div(size_average=) or kl_div(reduce=), which PyTorch deprecates,")
    sides = arguments["input"], arguments["target"]
    logits = next(side for side in sides if hasattr(side, "vocabulary"))
    parts = [_like(side, logits) for side in sides]
    out = F.kl_div(parts[0], parts[1], reduction="none", log_target=arguments.get("log_target", False))
    elements, reduction = logits.with_local(out), arguments.get("reduction", "mean")
    if reduction == "none":
        return elements
    total = elements.sum()
    if reduction == "sum":
        return total
    if reduction not in ("mean", "batchmean"):
        F.kl_div(out, out, reduction=reduction)  # as PyTorch refuses it
    return marked_mean(total / (elements.numel() if reduction == "mean" else elements.shape[0]))


def _like(x: T, logits: Any) -> T:
    """This rank's shard of `x`, which is sharded as `logits` are, or full."""
    if hasattr(x, "vocabulary"):
        if not same_layout(x.vocabulary, logits.vocabulary):
            refuse_layouts(x, logits)
        return local_tensor(x)
    vocabulary = logits.vocabulary
    if x.shape != logits.shape:
        refuse(f"kl_div of sharded {list(logits.shape)} with a tensor of shape {list(x.shape)}")
    full = ops.copy(x, vocabulary.group) if x.requires_grad else x
    return full[..., vocabulary.start : vocabulary.stop]


_SOFTMAXES = (F.softmax, torch.softmax, T.softmax, F.log_softmax, torch.log_softmax, T.log_softmax)
_MEANS = (T.mean, torch.mean)
VOCABULARY_FUNCTIONS: dict[Callable, Callable] = {
    **dict.fromkeys(_SOFTMAXES, _softmax),
    **dict.fromkeys((torch.special.softmax, torch.special.log_softmax), _softmax),
    **dict.fromkeys((T.logsumexp, torch.logsumexp, torch.special.logsumexp), _logsumexp),
    **dict.fromkeys((T.sum, torch.sum, *_MEANS), _total),
    **dict.fromkeys((T.gather, torch.gather), _gather),
    F.kl_div: _kl_div,
}
