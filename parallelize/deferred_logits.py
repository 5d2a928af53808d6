"""Logits that a head has not made yet, and that look like logits to a stock model.

With `fuse_loss` the head returns `DeferredLogits`: its own input, marked. They report the shape and dtype of the logits; what
model code does to logits before a loss (shift, flatten, cast, scale, cap) is done to the hidden states or written down; and
`F.cross_entropy` computes product and loss together, one chunk of tokens at a time.

Where a gradient is wanted, a function that would need all logits is refused by name. Without gradients (evaluation,
generation) it gets them: they are made at that moment, of the tokens that are left by then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from parallelize import _torch_private as private
from parallelize.errors import ModelError, Problem
from parallelize.head import Head, check_held
from parallelize.ops import collectives as ops
from parallelize.ops.vocabulary_softmax import cooled
from parallelize.sharded_logits import (
    ELEMENTWISE,
    HANDLERS,
    ShardedLogits,
    is_attribute,
    mark,
    simplified,
    stock_arguments,
)

T = torch.Tensor


@dataclass(frozen=True)
class Deferred:
    """What deferred logits stand for.

    Attributes:
        head: with the tail written down so far.
        sharded: whether logits, once made, stay sharded over the vocabulary.
        probe: an empty tensor that has gone through the tail: it knows the dtype.
        watched, version: tensors that may show that the head's weight is no longer that of its forward.
    """

    hidden: T
    head: Head
    sharded: bool
    probe: T
    watched: tuple[T, ...]
    version: int

    def check(self) -> None:
        """Raises: ModelError `weight-changed`: not the weights that the forward ran with; `weight-let-go`."""
        if _version_of(self.watched) != self.version:
            fix = "take the loss, or `.made()`, before the optimiser's step"
            what = "the head's weight was changed before the logits that it owes were made"
            raise ModelError(Problem("weight-changed", what, fix=fix))
        check_held(self.head.weight)

    def logits(self) -> T:
        """The logits themselves: `ShardedLogits`, or whole ones (one all-gather)."""
        self.check()
        return logits_of(self.hidden, self.head, self.sharded)

    def cross_entropy(self, targets: T, **options: Any) -> T:
        """As `parallelize.cross_entropy`."""
        self.check()
        return _without_widening(self.head).cross_entropy(self.hidden, targets, **options)

    def token_statistics(self, ids: T, ignore_index: int, temperature: float, *, entropy: bool) -> tuple[T, T | None]:
        """As `Head.token_statistics`, of logits / temperature."""
        self.check()
        head = _without_widening(self.head)
        if temperature != 1.0:
            head = _extended(self.head, Step(cooled, (_HERE, temperature)))
        return head.token_statistics(self.hidden, ids, ignore_index, entropy=entropy)

    def requires_grad(self) -> bool:
        parts = (self.hidden, self.head.weight, self.head.bias)
        return any(part is not None and part.requires_grad for part in parts)

    def detached(self) -> Deferred:
        return replace(self, hidden=self.hidden.detach(), head=self.head.detached())


class DeferredLogits(ShardedLogits):
    """Logits [..., V] that are not there; underneath lie the hidden states [..., H]. Made by a planned head."""

    _deferred: Deferred
    _made: T | None  # the logits, once something without gradients has looked at them

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
        if func in ELEMENTWISE and (steps := _with_step(first, func, args, kwargs)) is not None:
            return steps
        if func in _ALLOWED or is_attribute(func):
            with private.plain_functions():
                return func(*args, **kwargs)
        return _on_logits(func, args, kwargs)

    @property
    def deferred(self) -> Deferred | None:
        """What they stand for; None once they were made. Raises: ModelError `reentrant-checkpoint`."""
        _check_graph(self)
        return self.__dict__["_deferred"] if self.__dict__["_made"] is None else None

    def again(self, part: T) -> DeferredLogits:
        return _marked(replace(self.__dict__["_deferred"], hidden=part))

    def made(self) -> T:
        """The logits as the head gives them without `fuse_loss`: `ShardedLogits`, or whole. With autograd."""
        deferred = self.deferred
        return self.__dict__["_made"] if deferred is None else deferred.logits()

    def to_local(self) -> T:
        """This rank's part of the logits as a plain tensor, with autograd. It is made now."""
        deferred = self.deferred
        if deferred is not None:
            deferred.check()
            return deferred.head.logits(deferred.hidden)
        made, vocabulary = self.made(), self.vocabulary
        return made.to_local() if isinstance(made, ShardedLogits) else made[..., vocabulary.start : vocabulary.stop]


def logits_of(hidden: T, head: Head, sharded: bool) -> T:
    """What a head gives: `ShardedLogits`, or whole logits (one all-gather)."""
    local, vocabulary = head.logits(hidden), head.vocabulary
    return mark(local, vocabulary) if sharded else ops.gather(local, vocabulary.group, -1, vocabulary.full, "replicate")


def defer(hidden: T, head: Head, sharded: bool, registered: tuple[T, ...]) -> DeferredLogits:
    """Mark hidden states as the logits that a head would make of them.

    Args:
        sharded: what they are, once made. registered: the parameters of the weight, which writes go through.
    """
    watched = (*registered, head.weight)
    return _marked(Deferred(hidden, head, sharded, hidden.detach().new_empty(0), watched, _version_of(watched)))


def _version_of(watched: tuple[T, ...]) -> int:
    """Writes so far; those through a DTensor do not show on the tensor that lies in it."""
    return sum(x._version for x in watched if not x.is_inference())


def _marked(deferred: Deferred) -> DeferredLogits:
    deferred = deferred if torch.is_grad_enabled() else deferred.detached()
    with private.plain_functions():
        out = deferred.hidden.as_subclass(DeferredLogits)
    out.__dict__.update(_deferred=deferred, _made=None, vocabulary=deferred.head.vocabulary)
    return out


def _on_logits(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run `func` on logits that are made now; refuse it where a gradient is wanted.

    They are kept where nothing wants one. Else they are for this call alone (a metric before the loss): they have no graph.
    """

    def made(arg: Any) -> Any:
        if not isinstance(arg, DeferredLogits):
            return arg
        if (deferred := arg.deferred) is None:
            return arg.made()
        if not deferred.requires_grad():
            arg.__dict__["_made"] = deferred.logits()
            return arg.made()
        if torch.is_grad_enabled() or _writes(func):
            raise _refusal(func)
        return deferred.logits()

    args, kwargs = private.tree_map(made, (args, kwargs))
    return func(*args, **kwargs)


def _writes(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


_WRITES = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))}


def _check_graph(logits: DeferredLogits) -> None:
    """Raises: ModelError `reentrant-checkpoint`: a graph that ends in logits which were promised without one."""
    with private.plain_functions():
        has_graph = logits.requires_grad
    if has_graph and not logits.__dict__["_deferred"].hidden.requires_grad:
        what = (
            "a head with fuse_loss ran inside a reentrant checkpoint, which keeps no graph: its gradient would be lost"
        )
        fix = (
            "checkpoint(..., use_reentrant=False), or parallelize.recompute; or take the loss inside of the checkpoint"
        )
        raise ModelError(Problem("reentrant-checkpoint", what, fix=fix))


def _refusal(func: Callable) -> ModelError:
    name = getattr(func, "__name__", str(func))
    what = f"{name} needs logits, which a head with fuse_loss leaves unmade where a gradient is wanted"
    fix = (
        "take the loss by `F.cross_entropy`, `parallelize.cross_entropy` or `token_log_probs`; call `.made()` for logits; "
        "look at them under torch.no_grad(); or apply the plan with fuse_loss=False"
    )
    return ModelError(Problem("deferred-logits", what, fix=fix))


# -- what is written down -----------------------------------------------------------------------------------------------


_HERE = object()  # where a step's arguments have the logits


@dataclass(frozen=True)
class Step:
    """A call of an elementwise function."""

    func: Callable
    args: tuple
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __call__(self, z: T) -> T:
        here = lambda arg: z if arg is _HERE else arg  # noqa: E731
        return self.func(*map(here, self.args), **{key: here(arg) for key, arg in self.kwargs})


@dataclass(frozen=True)
class Steps:
    """Elementwise functions, one after another."""

    calls: tuple[Step, ...] = ()

    def __call__(self, z: T) -> T:
        for step in self.calls:
            z = step(z)
        return z


def _extended(head: Head, step: Step) -> Head:
    before = head.tail.calls if head.tail is not None else ()  # type: ignore[attr-defined]
    return replace(head, tail=Steps((*before, step)))


def _with_step(logits: DeferredLogits, func: Callable, args: tuple, kwargs: dict) -> DeferredLogits | None:
    """The logits with one more function written down; None where it is not one of each element alone."""
    deferred = logits.__dict__["_deferred"]
    if _writes(func):
        return None
    for other in (*args, *kwargs.values()):
        if other is logits or not isinstance(other, T):
            continue
        if other.ndim or other.requires_grad or isinstance(other, ShardedLogits):
            return None
    here = lambda arg: _HERE if arg is logits else arg  # noqa: E731
    step = Step(func, tuple(map(here, args)), tuple((key, here(arg)) for key, arg in kwargs.items()))
    probe = step(deferred.probe)
    if probe.device != deferred.probe.device or not probe.is_floating_point():
        return None
    if func in _SAME and probe.dtype == deferred.probe.dtype:
        return _marked(deferred)
    return _marked(replace(deferred, head=_extended(deferred.head, step), probe=probe))


_SAME = {T.contiguous, T.clone, torch.clone, T.to, T.float, T.double, T.half, T.bfloat16, T.type}


def _without_widening(head: Head) -> Head:
    """The last casts to float32 left out: the loss works in float32 anyway, and its gradient is narrow again."""
    calls = head.tail.calls if head.tail is not None else ()
    while calls and calls[-1].func is T.float and head.weight.dtype != torch.float64:
        calls = calls[:-1]
    return replace(head, tail=Steps(calls) if calls else None)


# -- handlers -----------------------------------------------------------------------------------------------------------


def _cross_entropy(func: Callable, args: tuple, kwargs: dict) -> T:
    """`F.cross_entropy`, with its own arguments and meaning (a mean over this batch)."""
    logits, target, options = stock_arguments(args, kwargs)
    if not isinstance(logits, DeferredLogits):
        raise ModelError(
            Problem("deferred-logits", "cross_entropy of other logits, with deferred ones among its arguments")
        )
    deferred = logits.__dict__["_deferred"]
    loss = deferred.cross_entropy(target, **options)
    return loss if torch.is_autocast_enabled(loss.device.type) else loss.to(deferred.probe.dtype)


def _detach(func: Callable, args: tuple, kwargs: dict) -> DeferredLogits:
    return _marked(args[0].__dict__["_deferred"].detached())


def _register_hook(func: Callable, args: tuple, kwargs: dict) -> Any:
    """`fully_shard` wants to know when backward comes to its output, and does not look at the gradient."""
    logits, hook = args
    if not str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
        raise _refusal(func)
    return logits.__dict__["_deferred"].hidden.register_hook(hook)


def _repr(func: Callable, args: tuple, kwargs: dict) -> str:
    deferred = args[0].__dict__["_deferred"]
    return f"DeferredLogits(shape={list(args[0].shape)}, dtype={deferred.probe.dtype}, not made)"


_KEPT = (T.shape.__get__, T.size, T.numel, T.nelement, T.__len__, T.view, T.reshape, T.flatten)  # type: ignore[attr-defined]
_HANDLERS: dict[Callable, Callable] = {
    **{func: HANDLERS[func] for func in (*_KEPT, torch.flatten, torch.reshape, T.__getitem__)},
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
