"""One bucket: this rank's messages are packed into one buffer, exchanged in one call, and written into full tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from parallelize.base.boxes import Box
from parallelize.base.torch_private import torch_tensors as private
from parallelize.checkpoint.export.weight_buckets import BucketPlan, MessageInBuffer
from parallelize.checkpoint.hub.tensor_messages import OwnedBoxes, StridedRegion, TensorMessage, as_target
from parallelize.checkpoint.run.local_tensors import ModelOnMesh
from parallelize.comm.groups import Group

T = torch.Tensor


@dataclass(frozen=True)
class Receivers:
    """Which ranks asked, and how they are reached.

    Attributes:
        group: the process group of all ranks; None for one process. ranks: their global ranks. rank: the index of this
            one.
        asked: for each rank, whether it receives full tensors.
        device: of the model's tensors, on which buffers are exchanged.
        may_gather: whether an all-gather may be used: every rank asked, and the backend copies nothing once more, as
            gloo's does. Else each rank sends its buffer to each rank that asked.
    """

    group: Any
    ranks: Sequence[int]
    rank: int
    asked: tuple[bool, ...]
    device: torch.device
    may_gather: bool

    @property
    def others_asked(self) -> bool:
        return any(asked for rank, asked in enumerate(self.asked) if rank != self.rank)


class StagingBuffer:
    """What is sent and received, in one allocation that all buckets reuse: threads of gloo let go of tensors late."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffer: T | None = None
        self._used = 0

    def begin(self, num_bytes: int) -> None:
        """Start a bucket that needs this many bytes."""
        self._used = 0
        if num_bytes and (self._buffer is None or self._buffer.numel() < num_bytes):
            self._buffer = None  # before the larger one is allocated
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def take(self, num_bytes: int) -> T:
        """The next bytes of the bucket."""
        start, self._used = self._used, self._used + num_bytes
        if self._buffer is None:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        return self._buffer[start : self._used]


class BucketExchange:
    """One bucket on this rank.

    At most two buckets of memory: the full tensors; and what is sent and received, in which this rank's own messages to
    itself are left out (they are copied from its shards), or which an all-gather pads to at most 9/8 of a bucket.

    Args:
        values: this rank's local tensors. target: the device of the full tensors. staging: what is sent and received,
            at most `most_staged` bytes.
    """

    def __init__(
        self,
        plan: BucketPlan,
        values: Values,
        to: Receivers,
        target: torch.device,
        staging: StagingBuffer,
        most_staged: int,
    ):
        self.plan, self.values, self.to, self.target, self.staging = plan, values, to, target, staging
        self.receives = to.asked[to.rank]
        self._padded = max(plan.sent_bytes)
        self.gathers = to.may_gather and 0 < self._padded * len(to.ranks) <= most_staged
        self._sent: T | None = None
        self._staged: T | None = None

    def staged_bytes(self) -> int:
        """The bytes that this rank sends and receives."""
        if self.gathers:
            return self._padded * len(self.to.ranks)
        own = self.plan.sent_bytes[self.to.rank]
        received = sum(self.plan.sent_bytes) - own if self.receives else 0
        return received + (own if self.to.others_asked else 0)

    def prepare(self) -> None:
        """Allocate, and pack what this rank sends: all that can fail on one rank alone."""
        size = self._padded if self.gathers else self.plan.sent_bytes[self.to.rank]
        self.buffer = self._empty(self.plan.num_bytes) if self.receives else None
        self.staging.begin(self.staged_bytes())
        if not self.to.others_asked:
            return
        if self.gathers:
            self._staged = self.staging.take(size * len(self.to.ranks))
            self._sent = self._staged[self.to.rank * size : (self.to.rank + 1) * size]
        else:
            self._sent = self.staging.take(size)
        own = self.plan.by_sender[self.to.rank]
        typed = _Typed(self._sent)
        _copy_all([item.packed.of(*typed.at(item.dtype)) for item in own], [self._source(item) for item in own])

    def _source(self, item: MessageInBuffer) -> T:
        """The values of a message of this rank."""
        assert item.source is not None
        return view_of(self.values[item.message.name], item.source)

    def _empty(self, num_bytes: int) -> T:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.target)

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
        assert self._sent is not None
        Group(self.to.group).all_gather_into(self._staged, self._sent).wait()
        return list(self._staged.split(self._padded))

    def _from_senders(self) -> list[T | None]:
        """Every sender's buffer to every rank that asked: one batch of messages, at most one for each pair of ranks."""
        received: list[T | None] = [None] * len(self.to.ranks)
        batch = []
        for rank, size in enumerate(self.plan.sent_bytes):
            if rank == self.to.rank:
                continue
            if self.receives and size:
                received[rank] = self.staging.take(size)
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
        full = _Typed(self.buffer)
        targets, values = [], []
        for sender, items in enumerate(self.plan.by_sender):
            typed = _Typed(received[sender])
            for item in items:
                value = self._source(item) if sender == self.to.rank else item.packed.of(*typed.at(item.dtype))
                targets.append(item.target.of(*full.at(item.dtype)))
                values.append(as_target(value, item.message.part))
        _copy_all(targets, values)


class _Typed:
    """A buffer of bytes as tensors of the dtypes that are asked for. Each begins where the buffer does."""

    def __init__(self, buffer: T | None):
        self._buffer = buffer
        self._views: dict[torch.dtype, tuple[T, int]] = {}

    def at(self, dtype: torch.dtype) -> tuple[T, int]:
        """(the buffer in this dtype, where it begins in its storage)."""
        if dtype not in self._views:
            assert self._buffer is not None
            view = self._buffer[: self._buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            self._views[dtype] = view, int(view.storage_offset())
        return self._views[dtype]


@torch.no_grad()
def _copy_all(targets: list[T], values: list[T]) -> None:
    if targets:
        torch._foreach_copy_(targets, values)


# -- local values ----------------------------------------------------------------------------------------------------
# The values that this rank sends, as they are now. Where they are is worked out once; memory is looked up at each
# export. Nothing here keeps a model's memory alive: it may be moved to the host between two exports.


Values = Mapping[str, T]
"""Name in the model -> local tensor."""


class LocalValues:
    """What this rank owns of a model, and where it is in its local tensors. Made of `owned`, without its values."""

    def __init__(self, on_mesh: ModelOnMesh, owned: OwnedBoxes):
        self._on_mesh = on_mesh
        self.regions: dict[str, list[tuple[Box, StridedRegion]]] = owned.regions()
        self._layouts = {name: _layout(tensor) for name, tensor in self._named()}

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Parameters by their names in the full model, and buffers."""
        for name, parameter in self._on_mesh.module.named_parameters():
            yield self._on_mesh.canonical(name), parameter
        yield from self._on_mesh.module.named_buffers()

    def current(self) -> dict[str, T] | None:
        """The local tensors as they are now; None if some were replaced, resized or renamed."""
        tensors = dict(self._named())
        if {name: _layout(tensor) for name, tensor in tensors.items()} != self._layouts:
            return None
        return {name: private.plain_local(tensors[name]).detach() for name in self.regions}

    def region(self, message: TensorMessage) -> StridedRegion:
        """Where the values of a message of this rank are in its local tensor."""
        box, region = self.regions[message.name][message.number]
        return region.within(message.box, box)

    def owned(self, values: Values) -> Iterator[tuple[str, list[T]]]:
        """(name, views of all that this rank owns of the tensor)."""
        for name, boxes in self.regions.items():
            yield name, [view_of(values[name], region) for _, region in boxes]


def view_of(local: T, region: StridedRegion) -> T:
    """A region of a local tensor."""
    return region.of(local, int(local.storage_offset()))


def _layout(tensor: Any) -> tuple[Any, ...]:
    local = private.plain_local(tensor)
    return id(tensor), local.dtype, local.shape, local.stride(), getattr(tensor, "placements", None)
