"""ZeRO 3 with forwards that use parameters on some ranks alone, or write to them.

`fully_shard` reduces those of a unit's parameters that have a gradient on this rank, in one buffer. Where ranks took
other branches of a model, their buffers would hold other parameters. So a rank adds zeros for what it did not use. A
parameter that no rank used must not keep these zeros, which an optimizer would take for a gradient: at the end of a
backward the ranks tell each other what they used.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.collective_order import UnitOrder
from parallelize.axes.zero.unit_groups import (
    before_reduction,
    fill_unsharded_gradients,
    has_unsharded_gradient,
    trained_in,
    unit_groups,
    was_reached,
)
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group


class UnusedParameters:
    """Completes the gradients of a model's units in each backward.

    Args:
        units: the modules to which `fully_shard` was applied.
        group: the ranks over which their gradients are summed: along all data axes.
        order: of the messages that these ranks send.
        at_end: called at the end of a backward that reduces.

    Cost: a backward that reduces ends with an all-reduce of one byte per parameter. The host waits for it only on ranks
        that did not use some parameter.
    """

    def __init__(self, units: Iterable[Any], group: Group, order: UnitOrder, at_end: Iterable[Callable[[], None]] = ()):
        self.group, self._order, self.at_end = group, order, [*at_end]
        parts = [part for unit in units for part in unit_groups(unit)]
        self._index = {id(param): n for n, param in enumerate(param for part in parts for param in part.fsdp_params)}
        self._device = parts[0].device if parts else torch.device("cpu")
        self.reset()
        if group.size > 1:
            for part in parts:
                before_reduction(part, self._complete)

    def reset(self) -> None:
        """Forget a backward that failed."""
        self._reached: set[int] = set()  # ids of groups that backward has reached since they were last reduced
        self._used: set[int] = set()  # ids of reduced parameters that had a gradient on this rank
        self._filled: dict[int, Any] = {}  # id -> a parameter that has only zeros, and had no gradient before
        self._queued: int | None = None  # the backward at whose end zeros are dropped

    def _complete(self, part: Any) -> None:
        """Give every trained parameter a gradient, if the unit has run in a backward that is now reduced."""
        params = trained_in(part)
        used = {id(param) for param in params if has_unsharded_gradient(param)}
        if was_reached(part) or used:
            self._reached.add(id(part))
        if not part.reduce_grads or id(part) not in self._reached:
            return
        self._reached.discard(id(part))
        self._used |= used
        for param in params:
            if id(param) not in used and param.sharded_param.grad is None:
                self._filled[id(param)] = param
        fill_unsharded_gradients(params)
        backward = private.backward_id()
        if part.all_reduce_grads and backward not in (-1, self._queued):
            self._queued = backward
            private.call_after_backward(self._after_backward)

    def waits(self, part: Any) -> bool:
        """Whether backward has reached a group of parameters that is still to be reduced."""
        return id(part) in self._reached or any(map(has_unsharded_gradient, trained_in(part)))

    def _after_backward(self) -> None:
        """Queue once more: the units that are reduced at the end of backward come first."""
        private.call_after_backward(self.drop_zeros)

    @torch.no_grad()
    def drop_zeros(self) -> None:
        """After a reduction: take the zeros from the parameters that no rank has used. Call it on every rank."""
        if self.group.size == 1:
            return
        used, filled = self._used, self._filled
        self._used, self._filled, self._queued = set(), {}, None
        on_some_rank = torch.zeros(len(self._index), dtype=torch.uint8)
        on_some_rank[[self._index[key] for key in used]] = 1
        on_some_rank = on_some_rank.to(self._device)
        with self._order.sending("a backward", "ends"):
            self.group.all_reduce(on_some_rank, dist.ReduceOp.MAX)
        if filled:
            flags = on_some_rank.tolist()
            for key, param in filled.items():
                if not flags[self._index[key]]:
                    param.sharded_param.grad = None
        for call in self.at_end:
            call()


# -- parameter writes ------------------------------------------------------------------------------------------------
# Forwards that write to parameters, under ZeRO 3: such a write goes to the copy that is gathered for this forward.
# Backward gathers the stored shards again, so that its gradients would be those of other values than the forward's,
# without an error. Which parameters a class may write to is read from its source
# (`self.linear.weight.data.clamp_(...)`); after a forward of the unit that has them they are compared with what they
# were before it.


_WRITE = re.compile(r"\bself\.([A-Za-z_][\w.]*?)\.data\.[a-z]\w*_\(")
_ONCE = re.compile(r"init|reset")  # methods that run before training


def refuse_writes(units: Mapping[str, nn.Module], module: nn.Module) -> None:
    """Compare the parameters that forwards may write to, around each forward of their unit.

    Args:
        units: that `fully_shard` was applied to, by name; "" is the model.
    """
    of_units: dict[str, list[tuple[nn.Module, str, str]]] = {}
    for name, owner in module.named_modules():
        kind: Any = type(owner)
        for path in _written_by(kind):
            place, _, key = path.rpartition(".")
            holder = _inner(owner, place)
            if holder is not None and key in holder._parameters:
                inside = [unit for unit in units if not unit or f"{name}.".startswith(f"{unit}.")]
                full = ".".join(filter(None, (name, path)))
                of_units.setdefault(max(inside, key=len), []).append((holder, key, full))
    for unit, parameters in of_units.items():
        comparison = _Comparison(parameters)
        units[unit].register_forward_pre_hook(comparison.before)  # after that of `fully_shard`, which gathers
        units[unit].register_forward_hook(comparison.after, prepend=True)  # before that of `fully_shard`, which frees


class _Comparison:
    """parameters: (module, key, full name)."""

    def __init__(self, parameters: list[tuple[nn.Module, str, str]]):
        self.parameters = parameters
        self.values: list[torch.Tensor] = []

    def before(self, *_: Any) -> None:
        self.values = [to_local(holder._parameters[key]).detach().clone() for holder, key, _ in self.parameters]

    def after(self, *_: Any) -> None:
        values, self.values = self.values, []
        for (holder, key, name), value in zip(self.parameters, values, strict=False):
            now = to_local(holder._parameters[key]).detach()
            if now.shape != value.shape or torch.equal(now, value):  # of another shape where it is not gathered now
                continue
            what = (
                f"the forward writes to {name}, of which ZeRO 3 has gathered a copy: backward would compute with other "
                "values"
            )
            raise ModelError(Problem("written-parameter", what, fix="zero=2, or write to it between steps"))


@cache
def _written_by(cls: type) -> tuple[str, ...]:
    """The parameters that methods of a class write to, as paths from `self`."""
    return tuple(dict.fromkeys(path for method in _methods(cls) for path in _WRITE.findall(method)))


def _methods(cls: type) -> Iterator[str]:
    for kind in cls.__mro__:
        if kind is nn.Module or not issubclass(kind, nn.Module) or kind.__module__.startswith("torch."):
            continue
        for name, function in vars(kind).items():
            if inspect.isfunction(function) and not _ONCE.search(name):
                try:
                    yield inspect.getsource(function)
                except OSError:  # it has no source
                    continue


def _inner(module: nn.Module, path: str) -> nn.Module | None:
    for name in filter(None, path.split(".")):
        inner = getattr(module, name, None)
        if not isinstance(inner, nn.Module):
            return None
        module = inner
    return module
