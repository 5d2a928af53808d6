"""A running all-gather of rows: each rank sends its rows once to each peer, in chunks that are used as they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from parallelize.comm.groups import Group
from parallelize.comm.p2p import Exchange, Step
from parallelize.comm.turns import yield_turn
from parallelize.ops.matmul.op_handshake import OpAgreement
from parallelize.ops.matmul.row_chunks import Box, as_rows, row_chunks_of, take

T = torch.Tensor
_WINDOW = 2  # receive buffers in flight if chunks cannot be received in place


def gather_rows(x: T, dim: int, full: int, group: Group) -> T:
    """[.., s, ..] -> [.., full, ..]: each rank sends its rows once to each peer."""
    with RowGather(x, dim, full, group, 0) as gather:
        gather.finish()
    return gather.gathered


class RowGather:
    """A running all-gather of rows, as a context manager; leaving the block waits for what has not arrived yet.

    Args:
        x, dim, full, group: as in `all_gather_matmul`.
        steps: chunks per shard (0 means 1).
        line: what the ranks must agree on before the first message.
        stream: a number that separates messages from those of another exchange that runs at the same time.
        keep: copy local rows to the gathered tensor too; if not, only `local` has them.
    """

    def __init__(
        self,
        x: T,
        dim: int,
        full: int,
        group: Group,
        steps: int,
        *,
        line: str = "",
        stream: int = 0,
        keep: bool = True,
    ):
        self.group, self.line, self.stream, self.keep = group, line, stream, keep
        self.gathered = x.new_empty((*x.shape[:dim], full, *x.shape[dim + 1 :]))
        self.rows, self.local = as_rows(self.gathered, dim), as_rows(x.contiguous(), dim)
        self.layout = layout = row_chunks_of(tuple(self.gathered.shape), dim, group.size, max(1, steps))
        self.local_box = (0, layout.outer, *layout.interval(group.rank))
        self.peers = layout.peers(group.rank)
        self.in_place = layout.outer == layout.outer_splits or layout.rows == 0
        self.sent = [take(self.local, box).contiguous() for box in layout.local_chunks(group.rank)]
        self.buffers = [
            {rank: self._buffer(rank, step) for rank in self.peers}
            for step in range(layout.steps if self.in_place else min(_WINDOW, layout.steps))
        ]
        self.posted: list[Step] = []
        self.exchange = Exchange(group)

    def __enter__(self) -> RowGather:
        OpAgreement(self.group, self.gathered.device, self.line).check()
        try:
            for _ in self.buffers:
                self._post()
            if self.keep:
                take(self.rows, self.local_box).copy_(self.local)
        except BaseException:
            self.exchange.drain()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        with self.exchange:
            while len(self.posted) < self.layout.steps:  # after a failure: peers wait for the remaining chunks
                self.posted[len(self.posted) - len(self.buffers)].wait()
                self._post()
            if error[1] is not None:
                self.exchange.drain()  # the block's own error is the one to raise

    def arrivals(self) -> Iterator[tuple[int, Box, int]]:
        """(rank, box, number of chunks still to come from that rank): local rows at once, others as they arrive."""
        yield self.group.rank, self.local_box, 0
        yield_turn()
        for step in range(self.layout.steps):
            self.posted[step].wait()
            for rank in self.peers:
                box = self.layout.chunks(rank)[step]
                if not self.in_place:
                    take(self.rows, box).copy_(self._received(rank, step))
                yield rank, box, self.layout.steps - 1 - step
            if len(self.posted) < self.layout.steps:
                self._post()

    def finish(self) -> None:
        """Wait for all rows."""
        for _ in self.arrivals():
            pass

    def _post(self) -> None:
        step = len(self.posted)
        receive = {rank: self._received(rank, step) for rank in self.peers}
        self.posted.append(self.exchange.post(dict.fromkeys(self.peers, self.sent[step]), receive, self.stream))

    def _buffer(self, rank: int, step: int) -> T:
        """Where a chunk is received: in place, or in a buffer that is large enough for any chunk of that rank."""
        chunks = self.layout.chunks(rank)
        if self.in_place:
            return take(self.rows, chunks[step])
        largest = max(b - a for a, b, _, _ in chunks)
        return self.rows.new_empty((largest, chunks[step][3] - chunks[step][2], self.rows.shape[2]))

    def _received(self, rank: int, step: int) -> T:
        a, b, _, _ = self.layout.chunks(rank)[step]
        return self.buffers[step % len(self.buffers)][rank][: b - a]
