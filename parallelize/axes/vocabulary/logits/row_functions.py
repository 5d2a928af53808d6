"""Functions of logits [..., V] that leave the vocabulary, their last dim, as it is: they run on the local tensor.

The local tensor is the shard [..., V/P], or the hidden states [..., H] of deferred logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private

T = torch.Tensor


def local_tensor(logits: Any) -> T:
    """The underlying tensor as a plain one, with autograd."""
    with private.plain_functions():
        return logits.as_subclass(torch.Tensor)


def refuse(what: str) -> NoReturn:
    """Raises: ModelError `sharded-logits`."""
    fix = "keep the vocabulary as the last dim; `.full_tensor()` for the full logits, or loss_parallel=False"
    raise ModelError(Problem("sharded-logits", what, fix=fix))


def _refuse_dim(func: Callable) -> NoReturn:
    refuse(f"{func.__name__} acts on the vocabulary, over which these logits are sharded")


def _along(position: int) -> Callable:
    """The handler of a function whose argument at `position` is the dim that it acts on; by default the first one."""

    def handler(func: Callable, args: tuple, kwargs: dict) -> Any:
        logits, local = args[0], local_tensor(args[0])
        dim = kwargs.get("dim", args[position] if len(args) > position else 0)
        if dim % local.ndim == local.ndim - 1:
            _refuse_dim(func)
        out = func(local, *args[1:], **kwargs)
        return logits.with_local(out) if isinstance(out, T) else tuple(map(logits.with_local, out))

    return handler


def _squeeze(func: Callable, args: tuple, kwargs: dict) -> T:
    local = local_tensor(args[0])
    dim_argument = kwargs.get("dim", args[1] if len(args) > 1 else tuple(range(local.ndim - 1)))
    dims = {dim % local.ndim for dim in (dim_argument if isinstance(dim_argument, (tuple, list)) else (dim_argument,))}
    return args[0].with_local(local.squeeze(tuple(dims - {local.ndim - 1})))  # a vocabulary of one entry stays


def _unsqueeze(func: Callable, args: tuple, kwargs: dict) -> T:
    local = local_tensor(args[0])
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if dim % (local.ndim + 1) == local.ndim:
        _refuse_dim(func)
    return args[0].with_local(func(local, dim))


def _expand(func: Callable, args: tuple, kwargs: dict) -> T:
    sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    if not sizes or sizes[-1] not in (-1, args[0].shape[-1]):
        _refuse_dim(func)
    return args[0].with_local(local_tensor(args[0]).expand(*sizes[:-1], -1))


def _like(func: Callable, args: tuple, kwargs: dict) -> T:
    other = args[1] if len(args) > 1 else kwargs["other"]
    return args[0].view(other.shape)


def _permuted(func: Callable, args: tuple, kwargs: dict) -> T:
    """A new order of the dims: with the vocabulary last, or in dim 1 as `F.cross_entropy` takes it."""
    logits, local = args[0], local_tensor(args[0])
    order = order_of(func, args, kwargs)
    last = local.ndim - 1
    if order[-1] == last:
        return logits.with_local(local.permute(order))
    if order == [0, last, *range(1, last)]:
        return ChannelFirstLogits.of(logits, local)
    _refuse_dim(func)


def _joined(func: Callable, args: tuple, kwargs: dict) -> T:
    """`cat` or `stack` of logits of one vocabulary."""
    arguments = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
    parts, dim = list(arguments.pop("tensors")), arguments.pop("dim", 0)
    first = parts[0]
    if arguments or not all(
        hasattr(part, "vocabulary") and same_layout(part.vocabulary, first.vocabulary) for part in parts
    ):
        refuse(f"{func.__name__} joins sharded logits with other tensors")
    locals_ = [local_tensor(part) for part in parts]
    ndim = locals_[0].ndim + (func is torch.stack)
    if dim % ndim == ndim - 1:
        _refuse_dim(func)
    return first.with_local(func(locals_, dim))


def same_layout(vocabulary: Any, other: Any) -> bool:
    """Whether two vocabularies have the same shards, also where their groups are of two equal meshes."""
    group, other_group = vocabulary.group, other.group
    same_ranks = group.size == other_group.size and (group.size == 1 or group.ranks == other_group.ranks)
    return vocabulary.full == other.full and same_ranks


def _layout(x: Any) -> str:
    vocabulary = getattr(x, "vocabulary", None)
    return (
        f"{vocabulary.full:,} entries over {vocabulary.group.size} ranks" if vocabulary else f"{list(x.shape)}, full,"
    )


def refuse_layouts(logits: Any, other: Any) -> NoReturn:
    """Raises: ModelError `sharded-logits` for logits that are not sharded alike."""
    sizes = " and ".join(map(_layout, (logits, other)))
    what = f"sharded logits of two layouts are combined: {sizes}"
    fix = "parallelize.distillation_loss(student, teacher) takes any two; or `.full_tensor()` of each"
    raise ModelError(Problem("sharded-logits", what, fix=fix))


JOINS: dict[Callable, Callable] = {torch.cat: _joined, torch.concat: _joined, torch.stack: _joined}
ROW_FUNCTIONS: dict[Callable, Callable] = {
    **{func: _along(2) for func in (T.chunk, torch.chunk, T.split, torch.split, T.tensor_split, torch.tensor_split)},
    **{func: _along(1) for func in (T.unbind, torch.unbind, T.select, torch.select, T.narrow, torch.narrow)},
    **{func: _along(1) for func in (T.index_select, torch.index_select)},
    **dict.fromkeys((T.squeeze, torch.squeeze), _squeeze),
    **dict.fromkeys((T.unsqueeze, torch.unsqueeze), _unsqueeze),
    **dict.fromkeys((T.transpose, torch.transpose, T.swapaxes, torch.swapaxes, T.swapdims, torch.swapdims), _permuted),
    **dict.fromkeys((T.permute, torch.permute, T.movedim, torch.movedim, T.moveaxis, torch.moveaxis), _permuted),
    T.mT.__get__: _permuted,  # type: ignore[attr-defined]
    T.expand: _expand,
    T.view_as: _like,
    T.reshape_as: _like,
}


# -- classes first ---------------------------------------------------------------------------------------------------
# Sharded or deferred logits with the vocabulary in dim 1, [B, V, ...], as `F.cross_entropy` takes them.


class ChannelFirstLogits(torch.Tensor):
    """What `logits.transpose(1, 2)` of logits [B, S, V] returns. `F.cross_entropy` with targets [B, S] runs on the
    shards.

    Attributes:
        logits: with the vocabulary as the last dim: `ShardedLogits` or `DeferredLogits`.

    Raises: ModelError `sharded-logits` for other functions than casts and the way back.
    """

    logits: Any

    @classmethod
    def of(cls, logits: Any, local: T) -> ChannelFirstLogits:
        """The logits with the vocabulary moved to dim 1. local: their underlying tensor."""
        with private.plain_functions():
            out = local.movedim(-1, 1).as_subclass(cls)
        out.logits = logits
        return out

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
        handler = _HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], ChannelFirstLogits):
            return handler(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            with private.plain_functions():
                return func(*args, **kwargs)
        what = f"{name or func} does not work on sharded logits with the vocabulary in dim 1"
        fix = "F.cross_entropy(logits, targets), with targets [B, ...]; other functions before the transposition"
        raise ModelError(Problem("sharded-logits", what, fix=fix))


def order_of(func: Callable, args: tuple, kwargs: dict) -> list[int]:
    """The dims of the input, in the order that they have in the output of a transposition of `args[0]`."""
    ndim = args[0].dim()
    numbers = torch.empty(*range(2, ndim + 2), device="meta")  # sizes that tell the dims
    moved = func(numbers, *args[1:], **kwargs)
    return [size - 2 for size in moved.shape]


def _back(func: Callable, args: tuple, kwargs: dict) -> T:
    """Another order of the dims, as of the logits."""
    ndim = args[0].dim()
    stored = [0, ndim - 1, *range(1, ndim - 1)]
    return args[0].logits.permute([stored[dim] for dim in order_of(func, args, kwargs)])


def _cast(func: Callable, args: tuple, kwargs: dict) -> T:
    logits = func(args[0].logits, *args[1:], **kwargs)
    return logits.permute(0, logits.dim() - 1, *range(1, logits.dim() - 1))


def _shape(func: Callable, args: tuple, kwargs: dict) -> Any:
    lead, *others, classes = args[0].logits.shape
    shape = torch.Size((lead, classes, *others))
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _cross_entropy(func: Callable, args: tuple, kwargs: dict) -> T:
    arguments = dict(zip(("input", "target"), args, strict=False)) | kwargs
    logits, target = arguments.pop("input").logits, arguments.pop("target")
    if target.is_floating_point() and target.ndim == logits.dim():  # probabilities [B, V, ...]
        target = target.movedim(1, -1)
    return F.cross_entropy(logits, target, *args[2:], **arguments)


_HANDLERS: dict[Callable, Callable] = {
    **dict.fromkeys((T.transpose, torch.transpose, T.permute, torch.permute, T.movedim, torch.movedim), _back),
    **dict.fromkeys((T.float, T.double, T.half, T.bfloat16, T.to, T.type, T.contiguous, T.detach), _cast),
    T.shape.__get__: _shape,  # type: ignore[attr-defined]
    T.size: _shape,
    T.dim: lambda func, args, kwargs: args[0].logits.dim(),
    T.ndim.__get__: lambda func, args, kwargs: args[0].logits.dim(),  # type: ignore[attr-defined]
    T.dtype.__get__: lambda func, args, kwargs: args[0].logits.dtype,  # type: ignore[attr-defined]
    T.requires_grad.__get__: lambda func, args, kwargs: args[0].logits.requires_grad,  # type: ignore[attr-defined]
    T.numel: lambda func, args, kwargs: args[0].logits.numel(),
    T.__repr__: lambda func, args, kwargs: (
        f"ChannelFirstLogits(shape={list(args[0].shape)}, logits={args[0].logits!r})"
    ),
    F.cross_entropy: _cross_entropy,
}
