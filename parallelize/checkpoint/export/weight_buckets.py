"""Buckets: which tensors are sent together, and where the elements of each are in flat buffers of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from parallelize.base.boxes import full_box, shape_of, volume
from parallelize.base.errors import CheckpointError, Problem
from parallelize.checkpoint.format.device_pieces import torch_dtype
from parallelize.checkpoint.format.header import SIZES
from parallelize.checkpoint.hub.file_shards import HubTensor
from parallelize.checkpoint.hub.tensor_messages import StridedRegion, TensorMessage, contiguous_region

T = torch.Tensor
SourceOf = Callable[[TensorMessage], StridedRegion | None]
_ALIGNED = 16  # bytes: a multiple of the size of every dtype
_FILL = 7 / 8
"""Of the size of a bucket: the rest is for what an all-gather pads."""


@dataclass(frozen=True)
class TensorMetadata:
    """A full tensor in a bucket. `name`: in the checkpoint. `start`: its first byte in the bucket's buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def dtype_name(self) -> str:
        """The dtype as engines name it, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: T) -> T:
        """The tensor, in a buffer of bytes."""
        return buffer[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


class MessageInBuffer(NamedTuple):
    """A message, and where its values are: everything that copying it takes, worked out once.

    Attributes:
        dtype: of the written tensor.
        source: region of the sender's local tensor; on other ranks None.
        packed: region of the sender's buffer. target: region of the buffer of full tensors. Both in elements of
            `dtype`.
    """

    message: TensorMessage
    dtype: torch.dtype
    source: StridedRegion | None
    packed: StridedRegion
    target: StridedRegion


@dataclass
class BucketPlan:
    """The tensors of a bucket, and what each rank sends of them.

    Attributes:
        num_bytes: of the buffer of full tensors.
        sent_bytes: of the buffer of each rank. by_sender: the messages of each rank, in the order of its buffer.
    """

    tensors: list[TensorMetadata] = field(default_factory=list)
    num_bytes: int = 0
    sent_bytes: list[int] = field(default_factory=list)
    by_sender: list[list[MessageInBuffer]] = field(default_factory=list)

    def add(self, tensor: HubTensor, messages: Iterable[TensorMessage], source_of: SourceOf) -> None:
        dtype, num_bytes = torch_dtype(tensor.dtype), SIZES[tensor.dtype]
        full = contiguous_region(tensor.shape, self.num_bytes // num_bytes)
        self.tensors.append(TensorMetadata(tensor.name, dtype, tensor.shape, self.num_bytes))
        self.num_bytes += aligned(tensor.num_bytes)
        for message in messages:
            packed = contiguous_region(shape_of(message.box), self.sent_bytes[message.sender] // num_bytes)
            target = full.within(message.target(), full_box(tensor.shape))
            item = MessageInBuffer(message, dtype, source_of(message), packed, target)
            self.by_sender[message.sender].append(item)
            self.sent_bytes[message.sender] += aligned(volume(message.box) * num_bytes)


@dataclass
class WeightBucket:
    """Full tensors, all of one bucket, on a rank that asked for them.

    Attributes:
        index: of the bucket in the export.
        metadata: name, dtype and shape of each tensor, on every rank.
        buffer: the bytes of all tensors; None on a rank that asked for none.
    """

    index: int
    metadata: tuple[TensorMetadata, ...]
    buffer: T | None
    _released: bool = False

    @property
    def tensors(self) -> dict[str, T]:
        """Name -> full tensor: views of the bucket's buffer. Empty on a rank that asked for none.

        Raises: CheckpointError `bucket-released` after the next bucket was asked for.
        """
        if self._released:
            what = f"bucket {self.index} was released when the next was asked for, so that memory stays at two buckets"
            fix = "copy or send its tensors before: dict(bucket.tensors) keeps them, and their memory"
            raise CheckpointError(Problem("bucket-released", what, fix=fix))
        return {} if self.buffer is None else {m.name: m.view(self.buffer) for m in self.metadata}

    def release(self) -> None:
        """Let go of the buffer."""
        self.buffer, self._released = None, True


@dataclass(frozen=True)
class WeightShard:
    """A box of a full tensor that this rank stores, and sends to nobody. `tensor`: a view of the parameter, where
    dtypes agree."""

    name: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]
    tensor: T


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def bucket_plans(
    tensors: Sequence[HubTensor],
    messages_of: Callable[[HubTensor], list[TensorMessage]],
    source_of: SourceOf,
    num_ranks: int,
    bucket_bytes: int,
) -> Iterator[BucketPlan]:
    """Divide tensors into buckets, in their order. A tensor that is larger than a bucket has one of its own."""
    plan: BucketPlan | None = None
    for tensor in tensors:
        if plan is not None and plan.num_bytes + aligned(tensor.num_bytes) > bucket_bytes * _FILL:
            yield plan
            plan = None
        if plan is None:
            plan = BucketPlan(sent_bytes=[0] * num_ranks, by_sender=[[] for _ in range(num_ranks)])
        plan.add(tensor, messages_of(tensor), source_of)
    if plan is not None:
        yield plan


def selected(
    tensors: Mapping[str, HubTensor], only: Callable[[str], bool] | None, changed: set[str] | None
) -> list[HubTensor]:
    """The tensors that `only` accepts by name and that have a changed source. None: all."""
    return [
        tensor
        for tensor in tensors.values()
        if (only is None or only(tensor.name))
        and (changed is None or any(part.source in changed for part in tensor.parts))
    ]
