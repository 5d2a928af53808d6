"""ZeRO 3 with parameters that only some ranks use: every rank reduces the same parameters of a unit.

`fully_shard` reduces those of a unit's parameters that have a gradient on this rank, in one buffer. Where ranks took other
branches of a model, their buffers would hold other parameters. So a rank adds zeros for what it did not use. A parameter that no
rank used must not keep these zeros, which an optimizer would take for a gradient: at the end of a backward the ranks tell each
other what they used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from parallelize.axes.zero.collective_order import UnitOrder
from parallelize.axes.zero.unit_groups import (
    before_reduction,
    fill_unsharded_gradients,
    has_unsharded_gradient,
    trained_in,
    unit_groups,
    was_reached,
)
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group


class UnusedParameters:
    """Completes the gradients of a model's units in each backward.

    Args:
        units: the modules to which `fully_shard` was applied.
        group: the ranks over which their gradients are summed: along all data axes.
        order: of the messages that these ranks send.
        after: called at the end of a backward that reduces.

    Cost: a backward that reduces ends with an all-reduce of one byte per parameter. The host waits for it only on ranks that
        did not use some parameter.
    """

    def __init__(self, units: Iterable[Any], group: Group, order: UnitOrder, after: Callable[[], None]):
        self.group, self._order, self._after = group, order, after
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
        self._after()
