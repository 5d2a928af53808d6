"""Logits that stay sharded over the vocabulary, and that a stock model can use as full logits.

Under `loss_parallel` the head returns `ShardedLogits`: the local shard, as a tensor subclass that knows its vocabulary.
It reports the full shape, so `logits.view(-1, vocab_size)` in a stock model is right, and `F.cross_entropy` (called by
`nn.CrossEntropyLoss`, inline or through a `loss_function`) runs on the shards. No torch function is patched. An
operation that would misread a shard raises an error that names the operation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallelize.axes.vocabulary.logits.row_functions import (
    JOINS,
    ROW_FUNCTIONS,
    local_tensor,
    refuse,
    refuse_layouts,
    same_layout,
)
from parallelize.axes.vocabulary.logits.vocabulary_functions import VOCABULARY_FUNCTIONS
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops import collectives as ops
from parallelize.ops.vocabulary.class_targets import Vocabulary
from parallelize.ops.vocabulary.cross_entropy import prepare_targets, token_losses
from parallelize.ops.vocabulary.softmax import working_dtype

T = torch.Tensor


class ShardedLogits(torch.Tensor):
    """Logits [..., V] of which this rank stores its shard [..., V/P]. Returned by a planned head under `loss_parallel`.

    Elementwise functions, indexing, and views, splits and joins that keep the vocabulary dim work on the shard. `all`
    and `any`, as in `logits.isfinite().all()`, are collectives over tp, as the loss is, and so are functions over the
    vocabulary: `softmax`, `log_softmax`, `logsumexp`, `sum`, `mean`, `gather` and `F.kl_div`. `F.cross_entropy` also
    takes `transpose(1, 2)`.

    Raises: ModelError `sharded-logits` for functions that need the full vocabulary.
    """

    vocabulary: Vocabulary

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func, args, kwargs = simplified(func, args, kwargs or {})
        if func is T.to and not isinstance(args[0], ShardedLogits):
            return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if func in ELEMENTWISE:
            first = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, ShardedLogits))
            args = tuple(_checked(arg, first) for arg in args)
            kwargs = {key: _checked(arg, first) for key, arg in kwargs.items()}
            with private.plain_functions():
                return mark(func(*args, **kwargs), first.vocabulary)
        if func in ALLOWED or is_attribute(func):
            with private.plain_functions():
                return func(*args, **kwargs)
        raise ModelError(
            Problem(
                "sharded-logits",
                f"{name_of(func)} does not work on logits that are sharded over the vocabulary",
                fix="use `F.cross_entropy`, or `cross_entropy`, `token_log_probs`, `distillation_loss` or `sample` of "
                "parallelize, `.to_local()` for the local shard, `.full_tensor()` for the full logits, "
                "or apply the plan with loss_parallel=False",
            )
        )

    def to_local(self) -> T:
        """The local shard [..., V/P] as a plain tensor, with autograd. No communication."""
        return self.as_subclass(torch.Tensor)

    def with_local(self, local: T) -> ShardedLogits:
        """Logits over the same vocabulary with the local tensor `local` [..., V/P], such as a view of this one."""
        return mark(local, self.vocabulary)

    def full_tensor(self) -> T:
        """The full logits [..., V] on every rank, with autograd. Cost: one all-gather over the tp group."""
        return gathered(self.to_local(), self.vocabulary)


def gathered(local: T, vocabulary: Vocabulary) -> T:
    """The full logits [..., V] of this rank's [..., V/P], on every rank, with autograd. Cost: one all-gather over the
    tp group."""
    return ops.gather(local, vocabulary.group, -1, vocabulary.full, "replicate")


def mark(local: T, vocabulary: Vocabulary) -> ShardedLogits:
    """Mark a local shard as logits; differentiable."""
    with private.plain_functions():
        out = local.as_subclass(ShardedLogits)
    out.vocabulary = vocabulary
    return out


# -- what `ShardedLogits` allows --------------------------------------------------------------------------------------

ELEMENTWISE = {
    *(T.mul, T.div, T.true_divide, T.__mul__, T.__rmul__, T.__truediv__, T.tanh, T.neg, T.__neg__, T.add, T.sub),
    *(torch.mul, torch.div, torch.true_divide, torch.tanh, torch.neg, T.mul_, T.div_, T.tanh_, T.__imul__),
    *(T.float, T.double, T.half, T.bfloat16, T.to, T.type, T.contiguous, T.clone, T.detach, T.requires_grad_),
    *(T.__add__, T.__radd__, T.__sub__, T.__rsub__, torch.add, torch.sub, torch.rsub, torch.clone, torch.detach),
    *(
        T.abs,
        torch.abs,
        T.exp,
        torch.exp,
        T.sigmoid,
        torch.sigmoid,
        T.pow,
        torch.pow,
        T.__pow__,
        T.square,
        torch.square,
    ),
    *(T.isfinite, torch.isfinite, T.isnan, torch.isnan, T.isinf, torch.isinf, T.nan_to_num, torch.nan_to_num, T.cpu),
    *(T.log, torch.log, T.logaddexp, torch.logaddexp, T.masked_fill, torch.masked_fill),
    *(T.clamp, torch.clamp, T.clamp_min, torch.clamp_min, T.clamp_max, torch.clamp_max, T.clip, torch.clip),
}
ALLOWED = {
    *(T.as_subclass, T.backward, T.register_hook, T.retain_grad, T.dim, T.get_device),
    *(T.is_floating_point, torch.is_floating_point),
    *(T.element_size, T.is_contiguous, T.is_complex, T.untyped_storage, T.__hash__, T._is_view),
}
# views of the tensor, although they are attributes
_VIEW_ATTRIBUTES = {getattr(T, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}


def is_attribute(func: Callable) -> bool:
    return is_descriptor(func) and func not in _VIEW_ATTRIBUTES


def is_descriptor(func: Callable) -> bool:
    return getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")


def name_of(func: Callable) -> str:
    """The name of a function of tensors, or of the attribute that it reads."""
    attribute = getattr(func, "__self__", None)
    return getattr(attribute if is_descriptor(func) else func, "__name__", str(func))


def simplified(func: Callable, args: tuple, kwargs: dict) -> tuple[Callable, tuple, dict]:
    """The same call with its tensor as the first argument; `x.to(other)` becomes `x.to(other.device, other.dtype)`."""
    rest = dict(kwargs)
    if not args and "input" in rest:
        args = (rest.pop("input"),)
    if func in (T.to, T.type_as):
        other = args[1] if len(args) > 1 else rest.get("other")
        if isinstance(other, T):
            rest.pop("other", None)
            return T.to, (args[0], other.device, other.dtype, *args[2:]), rest
    return func, args, rest


def _checked(arg: Any, logits: ShardedLogits) -> Any:
    """Another operand must not vary along the vocabulary dim; its gradient is summed over the ranks."""
    if isinstance(arg, ShardedLogits):
        if not same_layout(arg.vocabulary, logits.vocabulary):
            refuse_layouts(arg, logits)
        return arg
    if not isinstance(arg, torch.Tensor):
        return arg
    if arg.ndim and arg.shape[-1] != 1:
        raise ModelError(
            Problem(
                "sharded-logits",
                f"sharded logits are combined with a tensor of shape {list(arg.shape)}",
                fix="combine them before the head, or apply the plan with loss_parallel=False",
            )
        )
    return ops.copy(arg, logits.vocabulary.group) if arg.requires_grad else arg


def _full_shape(logits: ShardedLogits) -> torch.Size:
    with private.plain_functions():
        return torch.Size((*logits.shape[:-1], logits.vocabulary.full))


def _shape(func: Callable, args: tuple, kwargs: dict) -> Any:
    shape = _full_shape(args[0])
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return shape if dim is None else shape[dim]


def _numel(func: Callable, args: tuple, kwargs: dict) -> int:
    return _full_shape(args[0]).numel()


def _view(func: Callable, args: tuple, kwargs: dict) -> T:
    """A view that keeps the vocabulary as the last dim."""
    logits, *sizes = *args, *kwargs.values()
    sizes = list(sizes[0]) if sizes and isinstance(sizes[0], (tuple, list, torch.Size)) else sizes
    full = logits.vocabulary.full
    if not sizes or isinstance(sizes[0], torch.dtype) or sizes[-1] not in (full, -1) or sizes.count(-1) > 1:
        _refuse_view(logits, sizes)
    if sizes[-1] == -1 and _numel_of(sizes[:-1]) * full != _full_shape(logits).numel():
        _refuse_view(logits, sizes)
    local, tokens = local_tensor(logits), _full_shape(logits).numel() // full
    known_tokens = _numel_of([size for size in sizes[:-1] if size != -1])
    lead = [tokens // max(1, known_tokens) if size == -1 else size for size in sizes[:-1]]
    return logits.with_local(local.reshape(*lead, local.shape[-1]))


def _flatten(func: Callable, args: tuple, kwargs: dict) -> T:
    """A flatten of any dims but the vocabulary."""
    arguments = dict(zip(("input", "start_dim", "end_dim"), args, strict=False)) | kwargs
    logits = arguments["input"]
    ndim = len(_full_shape(logits))
    first, last = arguments.get("start_dim", 0) % ndim, arguments.get("end_dim", -1) % ndim
    if last == ndim - 1 and first != last:
        _refuse_view(logits, ["flatten"])
    return logits.with_local(local_tensor(logits).flatten(first, last))


def _numel_of(sizes: list[int]) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out


def _refuse_view(logits: ShardedLogits, sizes: list) -> None:
    raise ModelError(
        Problem(
            "sharded-logits",
            f"logits {list(_full_shape(logits))}, sharded over the vocabulary, are viewed as {sizes}",
            fix=f"keep the vocabulary as the last dim ({logits.vocabulary.full}), or use loss_parallel=False",
        )
    )


def _index(func: Callable, args: tuple, kwargs: dict) -> T:
    """Indexing of every dim but the vocabulary."""
    logits, index = args
    local = local_tensor(logits)
    if not _keeps_last_dim(index if isinstance(index, tuple) else (index,), local.ndim):
        raise ModelError(
            Problem("sharded-logits", "sharded logits are indexed along the vocabulary", fix="use loss_parallel=False")
        )
    return logits.with_local(local[index])


def _keeps_last_dim(items: tuple, ndim: int) -> bool:
    """Whether an index keeps the last of `ndim` dims in full."""
    if items and items[-1] is None:
        return False
    ellipses = [position for position, item in enumerate(items) if item is Ellipsis]
    if ellipses:
        after = [item for item in items[ellipses[0] + 1 :] if item is not None]
        if after and isinstance(after[-1], slice):
            return after[-1] == slice(None)
        return not after and sum(map(_dims_indexed, items[: ellipses[0]])) < ndim
    indexed = sum(map(_dims_indexed, items))
    return indexed < ndim or (isinstance(items[-1], slice) and items[-1] == slice(None))


def _dims_indexed(item: Any) -> int:
    if item is None:
        return 0
    return item.ndim if isinstance(item, torch.Tensor) and item.dtype == torch.bool else 1


def stock_arguments(args: tuple, kwargs: dict) -> tuple[ShardedLogits, T, dict[str, Any]]:
    """(logits, targets, options) of a call of `F.cross_entropy`.

    Raises: ModelError `sharded-logits` for its deprecated arguments.
    """
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    options = dict(zip(names, args, strict=False)) | kwargs
    for unsupported in ("size_average", "reduce"):
        if options.pop(unsupported, None) is not None:
            raise ModelError(Problem("sharded-logits", f"cross_entropy({unsupported}=) on sharded logits"))
    logits = options.pop("input")
    return logits, target_shard(options.pop("target"), logits), options


def target_shard(target: T, logits: T) -> T:
    """Targets as losses take them: probabilities that are sharded as the logits are become this rank's shard.

    Raises: ModelError `sharded-logits` for probabilities of another layout.
    """
    if not isinstance(target, ShardedLogits):
        return target
    if not isinstance(logits, ShardedLogits) or not same_layout(target.vocabulary, logits.vocabulary):
        refuse_layouts(target, logits)
    return target.to_local()


def _cross_entropy(func: Callable, args: tuple, kwargs: dict) -> T:
    """`F.cross_entropy` on shards with its own arguments and meaning (a mean over this batch)."""
    logits, target, options = stock_arguments(args, kwargs)
    local, reduction = local_tensor(logits), options.pop("reduction", "mean")
    prepared = prepare_targets(
        target, tuple(local.shape[:-1]), logits.vocabulary, working_dtype(local), reduction=reduction, **options
    )
    loss = prepared.reduced(token_losses(local, prepared, logits.vocabulary.group), reduction)
    in_autocast = not local.is_meta and torch.is_autocast_enabled(local.device.type)  # meta has no autocast
    return loss if in_autocast else loss.to(local.dtype)


def _all(func: Callable, args: tuple, kwargs: dict) -> T:
    """Whether all, or any, elements of the full tensor are true."""
    if len(args) > 1 or kwargs:
        refuse(f"{func.__name__} of some dims of logits that are sharded over the vocabulary")
    logits, of_all = args[0], func in (T.all, torch.all)
    out = func(local_tensor(logits)).to(torch.int32)
    logits.vocabulary.group.all_reduce(out, dist.ReduceOp.MIN if of_all else dist.ReduceOp.MAX)
    return out.bool()


def _deepcopy(func: Callable, args: tuple, kwargs: dict) -> T:
    """A copy of logits without a graph; with one PyTorch refuses it, as it does for any tensor."""
    logits, memo = args
    if id(logits) not in memo:
        memo[id(logits)] = logits.with_local(copy.deepcopy(local_tensor(logits), memo))
    return memo[id(logits)]


def _repr(func: Callable, args: tuple, kwargs: dict) -> str:
    logits = args[0]
    interval = f"[{logits.vocabulary.start}, {logits.vocabulary.stop})"
    return (
        f"ShardedLogits(shape={list(_full_shape(logits))}, this rank's vocabulary {interval}, {local_tensor(logits)!r})"
    )


HANDLERS: dict[Callable, Callable] = {
    T.shape.__get__: _shape,  # type: ignore[attr-defined]
    T.size: _shape,
    T.numel: _numel,
    torch.numel: _numel,
    T.nelement: _numel,
    T.nbytes.__get__: lambda func, args, kwargs: args[0].numel() * args[0].dtype.itemsize,  # type: ignore[attr-defined]
    T.itemsize.__get__: lambda func, args, kwargs: args[0].dtype.itemsize,  # type: ignore[attr-defined]
    T.__len__: lambda func, args, kwargs: _full_shape(args[0])[0],
    T.view: _view,
    T.reshape: _view,
    T.flatten: _flatten,
    torch.flatten: _flatten,
    torch.reshape: _view,
    T.__getitem__: _index,
    **ROW_FUNCTIONS,
    **JOINS,
    **VOCABULARY_FUNCTIONS,
    **dict.fromkeys((T.all, torch.all, T.any, torch.any), _all),
    T.__deepcopy__: _deepcopy,
    T.__repr__: _repr,
    T.__format__: lambda func, args, kwargs: format(repr(args[0]), *args[1:]),
    T.data.__get__: lambda func, args, kwargs: args[0].detach(),  # type: ignore[attr-defined]
    F.cross_entropy: _cross_entropy,
}
