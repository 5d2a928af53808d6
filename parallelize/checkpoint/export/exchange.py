"""One bucket: this rank's messages are packed into one buffer, exchanged in one call, and written into full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallelize.checkpoint.export.buckets import BucketPlan
from parallelize.checkpoint.format.boxes import slices_of
from parallelize.checkpoint.hub.tensor_messages import OwnedBoxes, as_target

T = torch.Tensor


@dataclass(frozen=True)
class Receivers:
    """Which ranks asked, and how they are reached.

    Attributes:
        group: the process group of all ranks; None for one process. ranks: their global ranks. rank: the index of this one.
        asked: for each rank, whether it receives full tensors.
        device: of the model's tensors, on which buffers are exchanged.
    """

    group: Any
    ranks: Sequence[int]
    rank: int
    asked: tuple[bool, ...]
    device: torch.device

    @property
    def others_asked(self) -> bool:
        return any(asked for rank, asked in enumerate(self.asked) if rank != self.rank)


class BucketExchange:
    """One bucket on this rank.

    At most two buckets of memory: the full tensors; and what is sent and received, in which this rank's own messages to
    itself are left out (they are copied from its shards), or which an all-gather pads to at most 9/8 of a bucket.

    Args:
        owned: this rank's values. limit: bytes of a bucket. target: the device of the full tensors.
    """

    def __init__(self, plan: BucketPlan, owned: OwnedBoxes, to: Receivers, limit: int, target: torch.device):
        self.plan, self.owned, self.to, self.target = plan, owned, to, target
        self.receives = to.asked[to.rank]
        self._padded = max(plan.sent_bytes)
        self.gathers = all(to.asked) and self._fits(limit)
        self._sent: T | None = None
        self._staged: T | None = None

    def _fits(self, limit: int) -> bool:
        """Whether an all-gather, which pads all messages to the longest, needs no more memory than two buckets."""
        staged = self._padded * len(self.to.ranks)
        return self.plan.num_bytes + staged <= 2 * max(limit, self.plan.num_bytes) and self._padded > 0

    def prepare(self) -> None:
        """Allocate, and pack what this rank sends. All that can fail on one rank alone, but for the unpacking."""
        size = self._padded if self.gathers else self.plan.sent_bytes[self.to.rank]
        self.buffer = self._empty(self.plan.num_bytes, self.target) if self.receives else None
        if not self.to.others_asked:
            return
        if self.gathers:
            self._staged = self._empty(size * len(self.to.ranks), self.to.device)
            self._sent = self._staged[self.to.rank * size : (self.to.rank + 1) * size]
        else:
            self._sent = self._empty(size, self.to.device)
        own = self.plan.by_sender[self.to.rank]
        _copy_all([item.view(self._sent) for item in own], [self.owned.view(item.message) for item in own])

    def _empty(self, num_bytes: int, device: torch.device) -> T:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def run(self) -> T | None:
        """Exchange and unpack. Returns the buffer of full tensors, or None. All ranks call it together."""
        received = self._all_gathered() if self.gathers else self._from_senders()
        if self.buffer is not None:
            self._unpack(received)
        self._sent = self._staged = None
        return self.buffer

    def _all_gathered(self) -> list[T | None]:
        if self._staged is None:
            return [None] * len(self.to.ranks)
        dist.all_gather_into_tensor(self._staged, self._sent, group=self.to.group)
        return list(self._staged.split(self._padded))

    def _from_senders(self) -> list[T | None]:
        """Every sender's buffer to every rank that asked: one batch of messages, at most one for each pair of ranks."""
        received: list[T | None] = [None] * len(self.to.ranks)
        batch = []
        for rank, size in enumerate(self.plan.sent_bytes):
            if rank == self.to.rank:
                continue
            if self.receives and size:
                received[rank] = self._empty(size, self.to.device)
                batch.append(self._p2p(dist.irecv, received[rank], rank))
            if self.to.asked[rank] and self._sent is not None and self._sent.numel():
                batch.append(self._p2p(dist.isend, self._sent, rank))
        for work in dist.batch_isend_irecv(batch) if batch else ():
            work.wait()
        return received

    def _p2p(self, op: Any, buffer: Any, rank: int) -> dist.P2POp:
        return dist.P2POp(op, buffer, self.to.ranks[rank], self.to.group)

    def _unpack(self, received: Sequence[T | None]) -> None:
        """Write every rank's messages into the full tensors; those of this rank from its shards."""
        assert self.buffer is not None
        full = [metadata.view(self.buffer) for metadata in self.plan.tensors]
        targets, values = [], []
        for sender, items in enumerate(self.plan.by_sender):
            buffer = received[sender]
            for item in items:
                own = sender == self.to.rank
                value = self.owned.view(item.message) if own or buffer is None else item.view(buffer)
                targets.append(full[item.tensor][slices_of(item.message.target())])
                values.append(as_target(value, item.message.part))
        _copy_all(targets, values)


@torch.no_grad()
def _copy_all(targets: list[T], values: list[T]) -> None:
    if targets:
        torch._foreach_copy_(targets, values)
