"""`parallelize::exchange_rows`: rows of a matrix to other ranks, and theirs to this one; how many is known on both sides.

    x [sum(sent), ...] by destination -> [sum(received), ...] by source

The reverse exchange is its adjoint. The op itself has no formula in autograd: it is called inside of the Functions of
`transfers.py`, of which one starts it and another one waits, forward and backward.

Under `LocalTensorMode` (`ops/simulation.py`) every rank has the same numbers, as with balanced routes: they are plain integers
there. It has no rule for DTensors. The rows of a rank are as many as routers chose, and the full tensor, all rows by source or by
destination, has
shards of which no placement says the sizes: a rule would have to give a layout that does not exist. PyTorch refuses such a call by name.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from parallelize.base.torch_private.torch_tensors import counts_collectives
from parallelize.comm.groups import Group
from parallelize.comm.turns import yield_turn
from parallelize.ops.library import define, fake

T = torch.Tensor


class RowsInFlight:
    """Rows on their way: [sum(received), ...], which are valid after `wait`."""

    __slots__ = ("_work", "rows")

    def __init__(self, rows: T, work: Any = None):
        self.rows, self._work = rows, work

    def wait(self) -> T:
        """The rows."""
        if self._work is not None:
            try:
                yield_turn()
            finally:
                self._work.wait()
            self._work = None
        return self.rows


def start_exchange(x: T, sent: list[int], received: list[int], group: Group) -> RowsInFlight:
    """Start to send rows, in an order of messages that is the same on every rank. No autograd.

    Args:
        x: [sum(sent), ...], contiguous, by destination.
        sent, received: numbers of rows by rank of the group.
    """
    if x.is_meta or group.wire is not None or counts_collectives():
        return RowsInFlight(torch.ops.parallelize.exchange_rows(x, sent, received, group.key))
    width = prod(x.shape[1:])
    out, work = group.start_all_to_all(x.view(-1), [n * width for n in sent], [n * width for n in received])
    return RowsInFlight(out.view(sum(received), *x.shape[1:]), work)


@define("exchange_rows(Tensor x, int[] sent, int[] received, str group) -> Tensor")
def _exchange_rows(x: T, sent: list[int], received: list[int], group: Group) -> T:
    width = prod(x.shape[1:])
    out = group.all_to_all(x.reshape(-1), [n * width for n in sent], [n * width for n in received])
    return out.view(sum(received), *x.shape[1:])


@fake("exchange_rows")
def _(x: T, sent: list[int], received: list[int], group: str) -> T:
    return x.new_empty((sum(received), *x.shape[1:]))
