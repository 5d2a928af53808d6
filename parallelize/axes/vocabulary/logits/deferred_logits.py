"""Logits that the head has not computed yet, in a form that a stock model can use as logits.

With `fuse_loss` the head returns `DeferredLogits`, a tensor subclass that stores the hidden states. It reports the
shape and dtype of the logits. A shift or flatten before the loss is applied to the hidden states; a cast, scale or cap
is recorded. `F.cross_entropy` then computes matmul and loss together, one chunk of tokens at a time.

If a gradient is required, a function that needs all logits raises an error that names the function. Without gradients
(evaluation, generation) the logits are computed at that point, for the remaining tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from parallelize.axes.vocabulary.logits.forms import Head
from parallelize.axes.vocabulary.logits.row_functions import ROW_FUNCTIONS
from parallelize.axes.vocabulary.logits.sharded_logits import (
    ELEMENTWISE,
    HANDLERS,
    ShardedLogits,
    gathered,
    is_attribute,
    mark,
    simplified,
    stock_arguments,
)
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.ops.vocabulary.linear_cross_entropy import check_storage
from parallelize.ops.vocabulary.softmax import temperature_scaled

T = torch.Tensor


@dataclass(frozen=True)
class Deferred:
    """The computation behind deferred logits.

    Attributes:
        hidden: [..., H].
        head: the head, with the elementwise functions recorded so far as its tail.
        sharded: whether the computed logits stay sharded over the vocabulary.
        probe: an empty tensor that has passed through the tail; its dtype is that of the logits.
        watched: tensors whose version counters show a write to the head's weight.
        version: the sum of these counters at the forward.
    """

    hidden: T
    head: Head
    sharded: bool
    probe: T
    watched: tuple[T, ...]
    version: int

    def check(self) -> None:
        """Raises: ModelError `weight-changed` if the weight was written to since the forward; `weight-let-go`."""
        if _version_of(self.watched) != self.version:
            fix = "take the loss, or `.made()`, before the optimizer step"
            what = "the head's weight was changed before its deferred logits were computed"
            raise ModelError(Problem("weight-changed", what, fix=fix))
        check_storage(self.head.weight)

    def logits(self) -> T:
        """The computed logits: `ShardedLogits`, or the full logits (one all-gather)."""
        self.check()
        return logits_of(self.hidden, self.head, self.sharded)

    def computed_by(self) -> tuple[T, Head]:
        """(hidden states, head) for a loss in float32 at least. Raises: as `check`."""
        self.check()
        return self.hidden, _without_widening(self.head)

    def cross_entropy(self, targets: T, **options: Any) -> T:
        """As `parallelize.cross_entropy`."""
        self.check()
        return _without_widening(self.head).cross_entropy(self.hidden, targets, **options)

    def token_statistics(self, ids: T, ignore_index: int, temperature: float, *, entropy: bool) -> tuple[T, T | None]:
        """As `Head.token_statistics`, of logits / temperature."""
        self.check()
        head = _without_widening(self.head)
        if temperature != 1.0:
            head = _with_op(self.head, ElementwiseOp(temperature_scaled, (_LOGITS, temperature)))
        return head.token_statistics(self.hidden, ids, ignore_index, entropy=entropy)

    def requires_grad(self) -> bool:
        inputs = (self.hidden, self.head.weight, self.head.bias)
        return any(x is not None and x.requires_grad for x in inputs)

    def detached(self) -> Deferred:
        return replace(self, hidden=self.hidden.detach(), head=self.head.detached())


class DeferredLogits(ShardedLogits):
    """Logits [..., V] that are not computed yet. The underlying tensor is the hidden states [..., H].

    Returned by a planned head with `fuse_loss=True`. `parallelize.cross_entropy`, `F.cross_entropy`, `token_log_probs`
    and the entropies compute what they need one chunk of tokens at a time. See the module docstring for other
    functions.

    Raises: ModelError `deferred-logits` for a function that needs all logits while a gradient is required;
        `weight-changed` or `weight-let-go` if the head's weight is no longer the one of the forward;
        `reentrant-checkpoint`.
    """

    _deferred: Deferred
    _computed: T | None  # the logits, once a function needed them and no gradient was required

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        func, args, kwargs = simplified(func, args, kwargs or {})
        if func is T.to and not isinstance(args[0], DeferredLogits):
            return func(*args, **kwargs)
        first = next(arg for arg in private.tree_leaves((args, kwargs)) if isinstance(arg, DeferredLogits))
        if first.deferred is None:
            return _on_logits(func, args, kwargs)
        try:
            if (handler := _HANDLERS.get(func)) is not None:
                return handler(func, args, kwargs)
        except ModelError:  # a view of the vocabulary
            return _on_logits(func, args, kwargs)
        if func in ELEMENTWISE and (recorded := _recorded(first, func, args, kwargs)) is not None:
            return recorded
        if func in _ALLOWED or is_attribute(func):
            with private.plain_functions():
                return func(*args, **kwargs)
        return _on_logits(func, args, kwargs)

    @property
    def deferred(self) -> Deferred | None:
        """The computation; None once the logits are computed. Raises: ModelError `reentrant-checkpoint`."""
        _check_graph(self)
        return self.__dict__["_deferred"] if self.__dict__["_computed"] is None else None

    def with_local(self, local: T) -> DeferredLogits:
        """Deferred logits of the same head for other hidden states, `local` [..., H]."""
        return _marked(replace(self.__dict__["_deferred"], hidden=local))

    def made(self) -> T:
        """Compute the logits that the head returns without `fuse_loss`, with autograd.

        Returns: `ShardedLogits` [..., V] if the plan keeps logits sharded, else the full logits [..., V].
        Cost: for full logits one all-gather over the tp group.
        Raises: ModelError `weight-changed`, `weight-let-go`, `reentrant-checkpoint`.
        """
        deferred = self.deferred
        return self.__dict__["_computed"] if deferred is None else deferred.logits()

    def to_local(self) -> T:
        """Compute this rank's shard [..., V/P] of the logits as a plain tensor, with autograd.

        Raises: as `made`.
        Cost: the head's matmul, forward without communication. Full logits that were made before are cut.
        """
        deferred = self.deferred
        if deferred is not None:
            deferred.check()
            return deferred.head.logits(deferred.hidden)
        logits, vocabulary = self.made(), self.vocabulary
        if isinstance(logits, ShardedLogits):
            return logits.to_local()
        return logits[..., vocabulary.start : vocabulary.stop]


def logits_of(hidden: T, head: Head, sharded: bool) -> T:
    """The logits of a head: `ShardedLogits`, or the full logits (one all-gather)."""
    local, vocabulary = head.logits(hidden), head.vocabulary
    return mark(local, vocabulary) if sharded else gathered(local, vocabulary)


def defer(hidden: T, head: Head, sharded: bool, registered: tuple[T, ...]) -> DeferredLogits:
    """Mark hidden states as deferred logits of a head.

    Args:
        sharded: whether the computed logits stay sharded over the vocabulary.
        registered: the registered parameters behind the head's weight, which an optimizer writes to.
    """
    watched = (*registered, head.weight)
    return _marked(Deferred(hidden, head, sharded, hidden.detach().new_empty(0), watched, _version_of(watched)))


def _version_of(watched: tuple[T, ...]) -> int:
    """The number of writes so far. A write through a DTensor does not change the version of its local tensor."""
    return sum(x._version for x in watched if not x.is_inference())


def _marked(deferred: Deferred) -> DeferredLogits:
    deferred = deferred if torch.is_grad_enabled() else deferred.detached()
    with private.plain_functions():
        out = deferred.hidden.as_subclass(DeferredLogits)
        # computed from `out`, so that a backward of the loss runs the hooks of `out`
        hidden = out.as_subclass(torch.Tensor)
    out.__dict__.update(_deferred=replace(deferred, hidden=hidden), _computed=None, vocabulary=deferred.head.vocabulary)
    return out


def _on_logits(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute the logits and run `func` on them; refuse `func` if a gradient is required.

    The logits are stored if no input requires a gradient. Otherwise (a metric under `no_grad` before the loss) they
    have no graph, so they serve this call only.
    """

    def computed(arg: Any) -> Any:
        if not isinstance(arg, DeferredLogits):
            return arg
        if (deferred := arg.deferred) is None:
            return arg.made()
        if not deferred.requires_grad():
            arg.__dict__["_computed"] = deferred.logits()
            return arg.made()
        if torch.is_grad_enabled() or _writes(func):
            raise _refusal(func)
        return deferred.logits()

    args, kwargs = private.tree_map(computed, (args, kwargs))
    return func(*args, **kwargs)


def _writes(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


_WRITES = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))}


def _check_graph(logits: DeferredLogits) -> None:
    """Raises: ModelError `reentrant-checkpoint` if a checkpoint added a graph that the hidden states do not have."""
    with private.plain_functions():
        has_graph = logits.requires_grad
    if has_graph and not logits.__dict__["_deferred"].hidden.requires_grad:
        what = (
            "a head with fuse_loss ran inside a reentrant checkpoint, which keeps no graph: its gradient would be lost"
        )
        fix = "checkpoint(..., use_reentrant=False), or parallelize.recompute; or take the loss inside the checkpoint"
        raise ModelError(Problem("reentrant-checkpoint", what, fix=fix))


def _refusal(func: Callable) -> ModelError:
    name = getattr(func, "__name__", str(func))
    what = f"{name} needs logits, which a head with fuse_loss defers if a gradient is required"
    fix = (
        "take the loss by `F.cross_entropy`, or by `cross_entropy`, `distillation_loss`, `token_log_probs` or "
        "`candidate_log_probs` of parallelize; call `.made()` for logits; read them under torch.no_grad(); or apply "
        "the plan with fuse_loss=False"
    )
    return ModelError(Problem("deferred-logits", what, fix=fix))


# -- recorded elementwise functions ------------------------------------------------------------------------------------


_LOGITS = object()  # stands for the logits among the arguments of an `ElementwiseOp`


@dataclass(frozen=True)
class ElementwiseOp:
    """A recorded call of an elementwise function."""

    func: Callable
    args: tuple
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __call__(self, z: T) -> T:
        argument = lambda arg: z if arg is _LOGITS else arg  # noqa: E731
        return self.func(*map(argument, self.args), **{key: argument(arg) for key, arg in self.kwargs})


@dataclass(frozen=True)
class ElementwiseOps:
    """Elementwise functions, applied in order: the tail of a head."""

    ops: tuple[ElementwiseOp, ...] = ()

    def __call__(self, z: T) -> T:
        for op in self.ops:
            z = op(z)
        return z


def _ops_of(head: Head) -> tuple[ElementwiseOp, ...]:
    if head.tail is None:
        return ()
    assert isinstance(head.tail, ElementwiseOps)  # `defer` starts without a tail, and only this module extends it
    return head.tail.ops


def _with_op(head: Head, op: ElementwiseOp) -> Head:
    return replace(head, tail=ElementwiseOps((*_ops_of(head), op)))


def _recorded(logits: DeferredLogits, func: Callable, args: tuple, kwargs: dict) -> DeferredLogits | None:
    """The logits with one more function recorded; None if it does not act on each element by itself."""
    deferred = logits.__dict__["_deferred"]
    if _writes(func):
        return None
    for other in (*args, *kwargs.values()):
        if other is logits or not isinstance(other, T):
            continue
        if other.ndim or other.requires_grad or isinstance(other, ShardedLogits):
            return None
    argument = lambda arg: _LOGITS if arg is logits else arg  # noqa: E731
    op = ElementwiseOp(func, tuple(map(argument, args)), tuple((key, argument(arg)) for key, arg in kwargs.items()))
    probe = op(deferred.probe)
    if probe.device != deferred.probe.device or not probe.is_floating_point():
        return None
    if func in _COPIES_AND_CASTS and probe.dtype == deferred.probe.dtype:  # nothing changes
        return _marked(deferred)
    return _marked(replace(deferred, head=_with_op(deferred.head, op), probe=probe))


_COPIES_AND_CASTS = {T.contiguous, T.clone, torch.clone, T.to, T.float, T.double, T.half, T.bfloat16, T.type, T.cpu}


def _without_widening(head: Head) -> Head:
    """Drop final casts to float32: the loss is computed in float32 anyway, and its gradient is cast back."""
    tail = _ops_of(head)
    while tail and tail[-1].func is T.float and head.weight.dtype != torch.float64:
        tail = tail[:-1]
    return replace(head, tail=ElementwiseOps(tail) if tail else None)


# -- handlers ----------------------------------------------------------------------------------------------------------


def _cross_entropy(func: Callable, args: tuple, kwargs: dict) -> T:
    """`F.cross_entropy` with its own arguments and meaning (a mean over this batch)."""
    logits, target, options = stock_arguments(args, kwargs)
    if not isinstance(logits, DeferredLogits):
        what = "cross_entropy of other logits, with deferred logits among its arguments"
        raise ModelError(Problem("deferred-logits", what))
    deferred = logits.__dict__["_deferred"]
    loss = deferred.cross_entropy(target, **options)
    in_autocast = not loss.is_meta and torch.is_autocast_enabled(loss.device.type)  # meta has no autocast
    return loss if in_autocast else loss.to(deferred.probe.dtype)


def _detach(func: Callable, args: tuple, kwargs: dict) -> DeferredLogits:
    return _marked(args[0].__dict__["_deferred"].detached())


def _register_hook(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Accept hooks of `fully_shard`, which run when backward reaches its output and do not read the gradient."""
    logits, hook = args
    if not str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
        raise _refusal(func)
    return logits.__dict__["_deferred"].hidden.register_hook(hook)


def _repr(func: Callable, args: tuple, kwargs: dict) -> str:
    deferred = args[0].__dict__["_deferred"]
    return f"DeferredLogits(shape={list(args[0].shape)}, dtype={deferred.probe.dtype}, deferred)"


_SIZES = (T.shape.__get__, T.size, T.numel, torch.numel, T.nelement, T.__len__, T.nbytes.__get__, T.itemsize.__get__)  # type: ignore[attr-defined]
_VIEWS = (T.view, T.reshape, T.flatten, torch.flatten, torch.reshape, T.__getitem__, *ROW_FUNCTIONS)
_HANDLERS: dict[Callable, Callable] = {
    **{func: HANDLERS[func] for func in (*_SIZES, *_VIEWS)},
    T.dtype.__get__: lambda func, args, kwargs: args[0].__dict__["_deferred"].probe.dtype,  # type: ignore[attr-defined]
    T.requires_grad.__get__: lambda func, args, kwargs: args[0].__dict__["_deferred"].requires_grad(),  # type: ignore[attr-defined]
    T._base.__get__: lambda func, args, kwargs: None,  # type: ignore[union-attr]  # writes are refused
    T.data.__get__: _detach,  # type: ignore[attr-defined]
    T.detach: _detach,
    torch.detach: _detach,
    T.__repr__: _repr,
    T.register_hook: _register_hook,
    F.cross_entropy: _cross_entropy,
}
_ALLOWED = {
    *(T.as_subclass, T.dim, T.get_device, T.is_complex, T.is_floating_point, T.is_contiguous, T.__hash__),
    T.untyped_storage,
}
