"""Pending reductions: gradients that are one term of a sum over ranks, and when that sum is taken.

Two kinds of parameters have such gradients: a replicated parameter that sees only part of the data on each rank (a norm
on a sequence shard, a q/k norm on local heads), and a key/value head that several ranks store. What a backward pass
adds is collected until the pass ends, summed over the ranks in one coalesced all-reduce for each group, and only then
added to `.grad`. So `.grad` is always reduced, and gradient accumulation never sums anything twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.autograd import Function

from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group

MAX_OPEN = 8  # backward passes inside each other (reentrant recompute); older entries are of passes that failed


@dataclass(frozen=True, eq=False)
class PendingReduction:
    """What the gradient of one parameter is summed over.

    Attributes:
        order: index of the parameter in the model, the same on every rank.
        parts: (group, dim, start, stop) of each interval that is summed over a group; `dim is None` means all of it.
    """

    order: int
    parts: tuple[tuple[Group, int | None, int, int], ...]

    def views(self, grad: torch.Tensor) -> Iterator[tuple[Group, torch.Tensor]]:
        for group, dim, start, stop in self.parts:
            yield group, grad if dim is None else grad.narrow(dim, start, stop - start)

    def reduce_in_backward(self, local: torch.Tensor) -> torch.Tensor:
        """`local`; its gradient is reduced during backward, which compilers can trace."""
        return _ReduceInBackward.apply(local, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingReduction:
        return self


class _ReduceInBackward(Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, reduction: PendingReduction) -> torch.Tensor:
        ctx.reduction = reduction
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        grad = grad.clone()
        for group, dim, start, stop in ctx.reduction.parts:
            if dim is None:
                group.all_reduce(grad)
            else:
                part = grad.narrow(dim, start, stop - start).contiguous()
                group.all_reduce(part)
                grad.narrow(dim, start, stop - start).copy_(part)
        return grad, None


class GradientReceiver(Protocol):
    """Receives the reduced gradient of one use of a parameter."""

    param: Any

    def deliver(self, grad: torch.Tensor) -> None: ...


_NO_REDUCTION = PendingReduction(0, ())


@dataclass(slots=True)
class _Entry:
    receiver: GradientReceiver
    reduction: PendingReduction
    grad: torch.Tensor


class PendingReductions:
    """Unreduced gradients of one parallelized model, by backward pass."""

    def __init__(self) -> None:
        self.completed = GradientCollector(self._finish)
        self._open: dict[int, list[_Entry]] = {}
        self._collected: list[_Entry] = []
        self._accumulated: dict[int, _Entry] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PendingReductions:
        return self  # entries refer to their parameters, so copies of a model can share it

    def __reduce__(self) -> Any:
        return PendingReductions, ()

    def add(
        self, receiver: GradientReceiver, reduction: PendingReduction, grad: torch.Tensor, immediately: bool
    ) -> None:
        """Collect what this backward pass adds to a gradient until the pass ends, or reduce it now."""
        if immediately:
            reduce_and_deliver([_Entry(receiver, reduction, grad)])
        elif self._accumulated is not None:
            self._accumulate(self._accumulated, receiver, reduction, grad)
        else:
            self._entries_of_backward().append(_Entry(receiver, reduction, grad))

    def collect(self, receiver: GradientReceiver, reduction: PendingReduction, grad: torch.Tensor) -> None:
        """Take what the backward pass that ends now has added to a gradient."""
        if self._accumulated is not None:
            self._accumulate(self._accumulated, receiver, reduction, grad)
        else:
            self._collected.append(_Entry(receiver, reduction, grad))

    @staticmethod
    def _accumulate(
        accumulated: dict[int, _Entry], receiver: GradientReceiver, reduction: PendingReduction, grad: torch.Tensor
    ) -> None:
        entry = accumulated.get(id(receiver))
        if entry is None:
            accumulated[id(receiver)] = _Entry(receiver, reduction, grad)
        else:
            entry.grad.add_(grad)

    def add_tied(self, receiver: GradientReceiver, grad: torch.Tensor) -> None:
        """Collect the gradient of one use of a tied parameter, whose hooks see the sum over all uses when the pass
        ends."""
        if private.backward_id() == -1:
            receiver.deliver(grad)
        else:
            self._entries_of_backward().append(_Entry(receiver, _NO_REDUCTION, grad))

    def _entries_of_backward(self) -> list[_Entry]:
        backward = private.backward_id()
        if backward not in self._open:
            while len(self._open) >= MAX_OPEN:
                del self._open[min(self._open)]
            self._open[backward] = []
            private.call_after_backward(lambda: self._finish(backward))
        return self._open[backward]

    def _finish(self, backward: int) -> None:
        """Reduce all that a pass has added, at its end, together: the gradients are those of both ways to get here."""
        try:
            self.completed.receive_all()
        finally:
            entries, self._collected = self._collected, []
        entries += self._open.pop(backward, ())
        if entries:
            reduce_and_deliver(entries)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Reduce once, at the end, for all backward passes inside."""
        if self._accumulated is not None:
            yield
            return
        self._accumulated = {}
        try:
            yield
            entries, self._accumulated = self._accumulated, None
            reduce_and_deliver(list(entries.values()))
        finally:
            self._accumulated = None


def reduce_and_deliver(entries: list[_Entry]) -> None:
    """Reduce all entries, with one all-reduce for each group, dtype and device, and deliver them."""
    entries.sort(key=_order)  # the same order on every rank
    buckets: dict[tuple[Any, ...], tuple[Group, list[torch.Tensor]]] = {}
    with torch.no_grad():
        for entry in entries:
            grad = entry.grad
            for group, view in entry.reduction.views(grad):
                key = id(group), grad.dtype, grad.device  # hashing a group takes longer
                buckets.setdefault(key, (group, []))[1].append(view)
        for group, views in buckets.values():
            _sum_over(group, views)
        for receiver, grad in _sums_over_uses(entries):
            receiver.deliver(grad)


_order = attrgetter("reduction.order")


def _sums_over_uses(entries: list[_Entry]) -> list[tuple[GradientReceiver, torch.Tensor]]:
    """One gradient for each parameter, also if several modules use it."""
    sums: dict[int, tuple[GradientReceiver, torch.Tensor]] = {}
    for entry in entries:
        earlier = sums.get(id(entry.receiver.param))
        grad = entry.grad if earlier is None else earlier[1].add_(entry.grad)
        sums[id(entry.receiver.param)] = entry.receiver, grad
    return list(sums.values())


def _sum_over(group: Group, views: list[torch.Tensor]) -> None:
    """Sum parts of gradients over a group in place, in one message."""
    if len(views) == 1 and views[0].is_contiguous():
        group.all_reduce(views[0])
        return
    flat = torch.cat([view if view.ndim == 1 else view.reshape(-1) for view in views])
    group.all_reduce(flat)
    sums = flat.split([view.numel() for view in views])
    # copied: PyTorch cannot copy a DTensor whose local tensor begins inside its storage
    torch._foreach_copy_(
        views, [s if s.shape == v.shape else s.view(v.shape) for s, v in zip(sums, views, strict=True)]
    )


# -- completed gradients ---------------------------------------------------------------------------------------------
# Local gradients that a backward pass has completed, moved to their parameters together when the pass ends. A hook in
# Python costs about 6 us where it runs between the ops of a backward pass, and one on every parameter was a third of
# the host cost of a plan. So what autograd calls at each leaf is a C function, `setattr`, which records the leaf in
# an object's dictionary; the work is done in one loop at the end, where it costs a tenth of that. The class of that
# object decides what `setattr` does: it runs Python at the first leaf of a pass, which asks for the end of the pass,
# and none at the others.


class Receiver(Protocol):
    """Takes the gradient of a leaf. It is the leaf's attribute `receiver`."""

    param: Any

    def __call__(self, leaf: torch.Tensor) -> None:
        """Take the gradient out of the leaf now, in the middle of a pass."""

    def receive(self, grad: torch.Tensor) -> None:
        """Take a gradient while the pass ends."""


class GradientCollector:
    """The completed gradients of one model.

    Args:
        at_end: called with the number of a pass that ends; it calls `receive_all`. None: that alone.
    """

    def __init__(self, at_end: Callable[[int], None] | None = None) -> None:
        self._recorder: _Recorder = _Idle()
        object.__setattr__(self._recorder, "at_end", at_end)

    def hook(self, leaf: torch.Tensor, receiver: Receiver) -> Callable[[torch.Tensor], None]:
        """What is called with `leaf` when its gradient is complete; `receiver` then gets the gradient when the pass
        ends.

        A pass that adds to a gradient which exists already delivers at once, so that no second gradient is stored. A
        pass that fails adds nothing.
        """
        leaf.receiver = receiver  # type: ignore[attr-defined]
        return partial(setattr, self._recorder, f"leaf{next(_NUMBERS)}")

    def receive_all(self) -> None:
        """Let the receivers have what is recorded so far."""
        _receive(self._recorder.close())

    def __reduce__(self) -> Any:
        return GradientCollector, ()


_NUMBERS = count()


class _Recorder:
    """Its attributes are the leaves that the running pass has completed."""

    __slots__ = ("__dict__", "at_end")
    at_end: Callable[[int], None] | None

    def close(self) -> list[Any]:
        """The recorded leaves, which are forgotten.

        In this order no leaf is lost of a pass that another thread runs: it is in the old dictionary, or begins to
        record anew.
        """
        object.__setattr__(self, "__class__", _Idle)
        leaves = self.__dict__
        object.__setattr__(self, "__dict__", {})
        return list(leaves.values())


class _Idle(_Recorder):
    """No pass records."""

    __slots__ = ()

    def __setattr__(self, name: str, leaf: Any) -> None:
        backward = private.backward_id()
        if backward == -1 or leaf.receiver.param.grad is not None:
            leaf.receiver(leaf)
            return
        object.__setattr__(self, "__class__", _Recording)
        setattr(self, name, leaf)
        private.call_after_backward(_EndOfPass(self, backward))


class _Recording(_Recorder):
    """A pass records: `setattr` is that of `object`, without Python."""

    __slots__ = ()


class _EndOfPass:
    """Called at the end of a pass; deleted without a call when the pass fails."""

    __slots__ = ("_backward", "_recorder")

    def __init__(self, recorder: _Recorder, backward: int):
        self._recorder: _Recorder | None = recorder
        self._backward = backward

    def __call__(self) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        if recorder.at_end is None:
            _receive(recorder.close())
        else:
            recorder.at_end(self._backward)

    def __del__(self) -> None:
        if self._recorder is not None:
            _drop(self._recorder.close())


def _receive(leaves: list[Any]) -> None:
    try:
        for leaf in leaves:
            grad = leaf.grad
            if grad is not None:  # None: the op defers this gradient
                leaf.grad = None
                leaf.receiver.receive(grad)
    except BaseException:
        _drop(leaves)
        raise


def _drop(leaves: list[Any]) -> None:
    for leaf in leaves:
        leaf.grad = None
