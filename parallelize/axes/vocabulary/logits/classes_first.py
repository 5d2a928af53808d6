"""Sharded or deferred logits with the vocabulary in dim 1, [B, V, ...], as `F.cross_entropy` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private

T = torch.Tensor


class ChannelFirstLogits(torch.Tensor):
    """What `logits.transpose(1, 2)` of logits [B, S, V] returns. `F.cross_entropy` with targets [B, S] runs on the shards.

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
    given = dict(zip(("input", "target"), args, strict=False)) | kwargs
    logits, target = given.pop("input").logits, given.pop("target")
    if target.is_floating_point() and target.ndim == logits.dim():  # probabilities [B, V, ...]
        target = target.movedim(1, -1)
    return F.cross_entropy(logits, target, *args[2:], **given)


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
    T.__repr__: lambda func, args, kwargs: f"ClassesFirst(shape={list(args[0].shape)}, logits={args[0].logits!r})",
    F.cross_entropy: _cross_entropy,
}
