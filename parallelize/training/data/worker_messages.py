"""What a worker sends to the training process: every tensor of it in one buffer.

A tensor that is sent by itself takes a file descriptor and a shared file, which the receiver keeps open as long as the tensor:
a batch of some hundred samples exceeds the 1024 that a process may have.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

_ALIGNED_TO = 16  # bytes: of the widest dtype, complex128


class WorkerMessage(NamedTuple):
    """A packed value. A named tuple, so that DataLoader's `pin_memory` pins the buffer."""

    pickled: bytes
    buffer: torch.Tensor


def packed(value: Any) -> WorkerMessage:
    """A value of any type as a message: its plain CPU tensors as bytes of one buffer, without the rest of their storages."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    buffer = torch.empty(pickler.size, dtype=torch.uint8, device="cpu")
    for (start, stop), data in pickler.placed:
        buffer[start:stop] = data
    return WorkerMessage(file.getvalue(), buffer)


def unpacked(message: WorkerMessage) -> Any:
    """The value, whose tensors are views of the message's buffer."""
    return _Unpickler(io.BytesIO(message.pickled), message.buffer).load()


class _Pickler(ForkingPickler):
    """Replaces tensors by their places in the buffer. What it leaves to torch (subclasses, sparse ones) is sent as torch does."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.size = 0
        self.placed: list[tuple[tuple[int, int], torch.Tensor]] = []
        self._seen: dict[int, tuple[Any, ...]] = {}
        self._kept: list[torch.Tensor] = []  # or another tensor may get the id of one that is gone

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return None
        if id(value) not in self._seen:
            self._kept.append(value)
            self._seen[id(value)] = self._place(value), value.dtype, tuple(value.shape)
        return self._seen[id(value)]

    def _place(self, value: torch.Tensor) -> tuple[int, int]:
        data = value.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        place = self.size, self.size + len(data)
        self.size = -(-place[1] // _ALIGNED_TO) * _ALIGNED_TO
        self.placed.append((place, data))
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffer: torch.Tensor):
        super().__init__(file)
        self.buffer = buffer
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def persistent_load(self, placed: tuple[Any, ...]) -> torch.Tensor:
        (start, stop), dtype, shape = placed
        if start == stop:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if (start, stop) not in self._made:
            self._made[start, stop] = self.buffer[start:stop].view(dtype).view(shape)
        return self._made[start, stop]


def _is_plain(tensor: torch.Tensor) -> bool:
    on_cpu = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return on_cpu and not tensor.requires_grad and not tensor.is_quantized
