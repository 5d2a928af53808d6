"""Rows to the ranks of their experts and results back, each as two autograd Functions: one starts it, one waits for it.

    tickets            = send(tokens, weights)        backward: waits for gradients of rows, adds them up by token
    rows, weights      = arrive(ticket)               backward: starts to send their gradients back
    ticket             = give_back(results)           backward: waits for the gradients of results
    tokens' results    = collect(tickets)             backward: starts to send the gradients of all results

A ticket is a number without meaning, by which autograd knows the order. What runs between a start and its wait overlaps
with the message, forward and backward. A row is sent with the weights of its choices in one message.

Source: Zhao et al., DeepEP (one row for each rank); Lepikhin et al., GShard, arXiv:2006.16668.
"""

from __future__ import annotations

import weakref
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from parallelize.base.torch_private.torch_tensors import counts_collectives
from parallelize.comm.groups import Group
from parallelize.comm.turns import yield_turn
from parallelize.ops import replay_cache
from parallelize.ops.collectives import refuse_double_backward
from parallelize.ops.experts.routes import Routes, TokenChunk
from parallelize.ops.library import define, fake

T = torch.Tensor


class Transfers:
    """The messages of one call. Every list is by chunk of tokens.

    Args:
        tokens, weights: of this rank: [tokens, hidden] and [tokens, k]. They are read for shapes and dtypes.
    """

    def __init__(self, routes: Routes, group: Group, tokens: T, weights: T):
        self.routes, self.group = routes, group
        self.hidden, self.k = tokens.shape[1], weights.shape[1]
        self.dtype, self.weights_dtype = tokens.dtype, weights.dtype
        count = len(routes.chunks)
        self.rows: list[RowsInFlight | None] = [None] * count
        self.row_grads: list[RowsInFlight | None] = [None] * count
        self.results: list[RowsInFlight | None] = [None] * count
        self.result_grads: list[RowsInFlight | None] = [None] * count

    def to_experts(self, x: T, chunk: TokenChunk) -> RowsInFlight:
        return start_exchange(x, chunk.sent, chunk.received, self.group)

    def to_tokens(self, x: T, chunk: TokenChunk) -> RowsInFlight:
        return start_exchange(x, chunk.received, chunk.sent, self.group)


def dispatch(tokens: T, weights: T, transfers: Transfers) -> tuple[T, ...]:
    """Start to send tokens, with their choices and weights, to the ranks of their experts. Returns a ticket for each
    chunk."""
    return _Send.apply(tokens, weights, transfers)


def arrive(ticket: T, transfers: Transfers, n: int) -> tuple[T, T, T]:
    """Wait for the rows of chunk `n`: tokens [rows, hidden], weights [rows, k] and choices [rows, k] of all experts."""
    return _Arrive.apply(ticket, transfers, n)


def give_back(results: T, transfers: Transfers, n: int) -> T:
    """Start to send results [rows, hidden] of chunk `n` back. Returns a ticket."""
    return _GiveBack.apply(results, transfers, n)


def collect(tickets: tuple[T, ...], transfers: Transfers) -> T:
    """Wait for the results of all chunks, and add them up by token: [tokens, hidden]."""
    return _Collect.apply(transfers, *tickets)


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, tokens: T, weights: T, transfers: Transfers) -> tuple[T, ...]:
        ctx.transfers = transfers
        choices = transfers.routes.choices.to(torch.int32)
        for n, chunk in enumerate(transfers.routes.chunks):
            rows = packed(*(x.index_select(0, chunk.rows) for x in (tokens, weights, choices)))
            transfers.rows[n] = _started(transfers.to_experts, rows, chunk)
        return tuple(tokens.new_zeros(()) for _ in transfers.routes.chunks)

    @staticmethod
    def backward(ctx: Any, *_: T):
        refuse_double_backward()
        transfers: Transfers = ctx.transfers
        num_tokens = len(transfers.routes.choices)
        grads = []
        for n, chunk in enumerate(transfers.routes.chunks):
            received = _waited(transfers.row_grads, n)
            grad, weights_grad = unpacked(received, transfers.hidden, (transfers.k, transfers.weights_dtype))
            grads.append((chunk.rows, grad, weights_grad))
        grad = _added_up([(rows, grad) for rows, grad, _ in grads], num_tokens)
        return grad, _added_up([(rows, grad) for rows, _, grad in grads], num_tokens), None


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, ticket: T, transfers: Transfers, n: int) -> tuple[T, T, T]:
        ctx.transfers, ctx.n = transfers, n
        sizes = (transfers.k, transfers.weights_dtype), (transfers.k, torch.int32)
        tokens, weights, choices = unpacked(_waited(transfers.rows, n), transfers.hidden, *sizes)
        ctx.mark_non_differentiable(choices)
        return tokens, weights, choices

    @staticmethod
    def backward(ctx: Any, grad: T, weights_grad: T, _: Any):
        refuse_double_backward()
        transfers, chunk = ctx.transfers, ctx.transfers.routes.chunks[ctx.n]
        transfers.row_grads[ctx.n] = transfers.to_tokens(packed(grad, weights_grad), chunk)
        return grad.new_zeros(()), None, None


class _GiveBack(Function):
    @staticmethod
    def forward(ctx: Any, results: T, transfers: Transfers, n: int) -> T:
        ctx.transfers, ctx.n = transfers, n
        transfers.results[n] = _started(transfers.to_tokens, results.contiguous(), transfers.routes.chunks[n])
        return results.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: T):
        refuse_double_backward()
        return _waited(ctx.transfers.result_grads, ctx.n), None, None


class _Collect(Function):
    @staticmethod
    def forward(ctx: Any, transfers: Transfers, *tickets: T) -> T:
        ctx.transfers = transfers
        chunks = transfers.routes.chunks
        results = [(chunk.rows, _waited(transfers.results, n)) for n, chunk in enumerate(chunks)]
        return _added_up(results, len(transfers.routes.choices))

    @staticmethod
    def backward(ctx: Any, grad: T):
        refuse_double_backward()
        transfers: Transfers = ctx.transfers
        chunks = list(enumerate(transfers.routes.chunks))
        for n, chunk in reversed(chunks):  # the order in which the experts need them
            transfers.result_grads[n] = transfers.to_experts(grad.index_select(0, chunk.rows), chunk)
        return None, *(grad.new_zeros(()) for _ in chunks)


def _started(start: Any, x: T, chunk: TokenChunk) -> RowsInFlight:
    """A message that a recomputed unit may have saved the result of."""
    exchanges: list[RowsInFlight] = []

    def send() -> T:
        exchanges.append(start(x, chunk))
        return exchanges[0].rows

    rows = replay_cache.run_collective("all_to_all", send)
    if not exchanges:
        return RowsInFlight(rows)
    if replay_cache.in_recompute():  # a replay ends after the last tensor that backward needs, perhaps before the wait
        replay_cache.at_exit(partial(_wait_for, weakref.ref(exchanges[0])))
    return exchanges[0]


def _wait_for(exchange: weakref.ref[RowsInFlight]) -> None:
    if (sent := exchange()) is not None:
        sent.wait()


def _waited(exchanges: list[RowsInFlight | None], n: int) -> T:
    """The result of a message, which the transfers then forget."""
    exchange, exchanges[n] = exchanges[n], None
    assert exchange is not None
    return exchange.wait()


def _added_up(parts: list[tuple[T, T]], num_tokens: int) -> T:
    """[num_tokens, width]: of (rows, values) the sums by row. A token's values are added in the order of ranks."""
    first = parts[0][1]
    out = first.new_zeros(num_tokens, first.shape[1])
    for rows, values in parts:
        out.index_add_(0, rows, values)
    return out


def packed(x: T, *others: T) -> T:
    """[rows, width] and matrices of any dtypes, side by side as one matrix in the dtype of `x`, in which they are
    bits."""
    sides = torch.cat([_bytes_of(other) for other in others], 1)
    padding = -sides.shape[1] % x.element_size()
    sides = F.pad(sides, (0, padding)) if padding else sides
    return torch.cat([x, sides.view(x.dtype)], 1)


def _bytes_of(matrix: T) -> T:
    dense = matrix.contiguous()
    if dense.stride(-1) != 1:  # an expanded gradient of one column
        dense = dense.clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8)


def unpacked(matrix: T, width: int, *others: tuple[int, torch.dtype]) -> tuple[T, ...]:
    """The reverse of `packed`, for others of these widths and dtypes."""
    sides, parts, offset = matrix[:, width:].contiguous().view(torch.uint8), [matrix[:, :width]], 0
    for columns, dtype in others:
        size = columns * dtype.itemsize
        parts.append(sides[:, offset : offset + size].contiguous().view(dtype))
        offset += size
    return tuple(parts)


# -- exchange rows ---------------------------------------------------------------------------------------------------
# `parallelize::exchange_rows`: rows of a matrix to other ranks, and theirs to this one; how many is known on both
# sides. x [sum(sent), ...] by destination -> [sum(received), ...] by source The reverse exchange is its adjoint. The
# op itself has no formula in autograd: it is called inside of the Functions of `transfers.py`, of which one starts it
# and another one waits, forward and backward. Under `LocalTensorMode` (`ops/library.py`) every rank has the same
# numbers, as with balanced routes: they are plain integers there. It has no rule for DTensors. The rows of a rank are
# as many as routers chose, and the full tensor, all rows by source or by destination, has shards of which no
# placement says the sizes: a rule would have to give a layout that does not exist. PyTorch refuses such a call by
# name.


class RowsInFlight:
    """Rows on their way: [sum(received), ...], which are valid after `wait`."""

    __slots__ = ("__weakref__", "_work", "rows")

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
    # a message that nobody waits for, as where a replay ends early, keeps what it sends, and not the graph before it
    x = x.detach()
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
