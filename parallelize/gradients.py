"""Gradients that are owed a reduction: what each parameter owes, and the ledger that pays once a backward pass.

A replicated parameter that sees only part of the data on each rank (a norm on a sequence shard, a q/k norm on local
heads) and a key/value head held by several ranks both have a gradient that is one part of a sum. What a backward pass
adds is kept apart until the pass ends, summed over the ranks in one coalesced all-reduce a group, and only then added to
`.grad`: so `.grad` is always the finished gradient, and accumulation never sums anything twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd import Function

from parallelize import _torch_private as private
from parallelize.groups import Group

MAX_OPEN = 8  # backward passes nested in each other (reentrant recompute); older entries belong to passes that failed


@dataclass(frozen=True, eq=False)
class Debt:
    """Parts of a gradient that are sums over a group: (group, dim, start, stop); `dim is None` means all of it."""

    order: int
    parts: tuple[tuple[Group, int | None, int, int], ...]

    def views(self, grad: torch.Tensor) -> Iterator[tuple[Group, torch.Tensor]]:
        for group, dim, start, stop in self.parts:
            yield group, grad if dim is None else grad.narrow(dim, start, stop - start)

    def pay_in_backward(self, local: torch.Tensor) -> torch.Tensor:
        """`local`, whose gradient is reduced where it arises: the form that compilers can trace."""
        return _PayInBackward.apply(local, self)

    def __deepcopy__(self, memo: dict) -> Debt:
        return self


class _PayInBackward(Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, debt: Debt) -> torch.Tensor:
        ctx.debt = debt
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        grad = grad.clone()
        for group, dim, start, stop in ctx.debt.parts:
            if dim is None:
                group.all_reduce(grad)
            else:
                part = grad.narrow(dim, start, stop - start).contiguous()
                group.all_reduce(part)
                grad.narrow(dim, start, stop - start).copy_(part)
        return grad, None


class Creditor(Protocol):
    def deliver(self, grad: torch.Tensor) -> None: ...


@dataclass
class _Entry:
    creditor: Creditor
    debt: Debt
    grad: torch.Tensor


class Ledger:
    """Unpaid gradients of one parallelized model, by backward pass."""

    def __init__(self) -> None:
        self._open: dict[int, list[_Entry]] = {}
        self._deferred: dict[int, _Entry] | None = None

    def __deepcopy__(self, memo: dict) -> Ledger:
        return self  # entries name their parameters, so copies of a model may share it

    def owe(self, creditor: Creditor, debt: Debt, grad: torch.Tensor, at_once: bool) -> None:
        """Write down what this backward pass adds to a gradient, or settle it now."""
        entry = _Entry(creditor, debt, grad)
        if at_once:
            settle([entry])
            return
        if self._deferred is not None:
            first = self._deferred.setdefault(id(creditor), entry)
            if first is not entry:
                first.grad.add_(grad)
            return
        number = private.backward_id()
        if number not in self._open:
            while len(self._open) >= MAX_OPEN:
                del self._open[min(self._open)]
            self._open[number] = []
            private.call_after_backward(lambda: settle(self._open.pop(number, [])))
        self._open[number].append(entry)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Pay once for all backward passes inside, when leaving."""
        if self._deferred is not None:
            yield
            return
        self._deferred = {}
        try:
            yield
            entries, self._deferred = self._deferred, None
            settle(list(entries.values()))
        finally:
            self._deferred = None


def settle(entries: list[_Entry]) -> None:
    """Reduce all entries with one all-reduce a group and dtype, and deliver them."""
    entries.sort(key=lambda entry: entry.debt.order)  # the same order on every rank
    buckets: dict[tuple, list[torch.Tensor]] = {}
    with torch.no_grad():
        for entry in entries:
            for group, view in entry.debt.views(entry.grad):
                buckets.setdefault((group, view.dtype, view.device), []).append(view)
        for (group, _, _), views in buckets.items():
            _sum_over(group, views)
        for entry in entries:
            entry.creditor.deliver(entry.grad)


def _sum_over(group: Group, views: list[torch.Tensor]) -> None:
    if len(views) == 1 and views[0].is_contiguous():
        group.all_reduce(views[0])
        return
    flat = torch.cat([view.reshape(-1) for view in views])
    group.all_reduce(flat)
    for view, part in zip(views, flat.split([view.numel() for view in views]), strict=True):
        view.copy_(part.view(view.shape))
