"""Files into tensors on a device, piece by piece through pinned memory: threads fill it while earlier pieces are copied.

A copy from memory that is not pinned goes through a buffer of the driver, and the host waits for it; and one thread reads the page
cache at a fraction of the bus's rate. So a box is cut into pieces along its first dims, threads read the next ones, and copies are
asynchronous on the current stream.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from parallelize.checkpoint.format.boxes import Box, shape_of
from parallelize.checkpoint.format.host_memory import bytes_of

T = torch.Tensor
PIECE_BYTES = 16 << 20
_SLOTS, _THREADS = 8, 4
Read = Callable[[Box, memoryview], None]


class DevicePieces:
    """Slots of pinned memory, each of which is read into and copied from in turn. Used by one thread.

    Args:
        device: where tensors are; those of the CPU are copied to without pinned memory.

    Memory: 8 pieces of 16 MiB, which PyTorch's allocator of pinned memory keeps for the process.
    """

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES):
        self.device, self.piece_bytes = device, piece_bytes
        self._on_device = device.type != "cpu"
        self._slots = [
            torch.empty(piece_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._on_device) for _ in range(_SLOTS)
        ]
        self._copied: list[Any] = [torch.Event(device) if self._on_device else None for _ in range(_SLOTS)]
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="read")

    def fill(self, read: Read, box: Box, dtype: torch.dtype, out: T) -> None:
        """Read a box, of one dim at least, whose elements have a dtype, into `out`, of any dtype.

        `out` is ready for operations on the current stream alone.

        read: writes a part of the box to memory, in any thread.
        Raises: what `read` does. `out` then has some of the pieces, and no thread reads any more.
        """
        reading: deque[tuple[Future, T, T, int]] = deque()
        try:
            for number, (part, target) in enumerate(self._parts(box, dtype, out)):
                if len(reading) == _SLOTS:
                    self._copy_first(reading)
                slot = number % _SLOTS
                if self._on_device:
                    self._copied[slot].synchronize()
                memory = self._slots[slot][: target.numel() * dtype.itemsize].view(dtype).view(target.shape)
                reading.append((self._threads.submit(read, part, bytes_of(memory)), memory, target, slot))
            while reading:
                self._copy_first(reading)
        finally:
            wait([future for future, *_ in reading])  # after an error, of what is still read

    def _parts(self, box: Box, dtype: torch.dtype, out: T) -> Iterator[tuple[Box, T]]:
        """Parts of a box that fit a slot, and their elements of `out`."""
        (start, stop), *rest = box
        row_bytes = math.prod(shape_of(box)[1:]) * dtype.itemsize
        if row_bytes > self.piece_bytes:
            for index in range(start, stop):
                for part, target in self._parts(tuple(rest), dtype, out[index - start]):
                    yield ((index, index + 1), *part), target.unsqueeze(0)
            return
        rows = self.piece_bytes // max(1, row_bytes)
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            yield ((first, last), *rest), out[first - start : last - start]

    def _copy_first(self, reading: deque[tuple[Future, T, T, int]]) -> None:
        """Copy the piece that was begun first, and forget it."""
        future, memory, target, slot = reading[0]
        future.result()
        reading.popleft()  # now, so that an interrupted wait leaves it among those that are waited for
        if memory.dtype != target.dtype and self._on_device:
            memory = memory.to(self.device, non_blocking=True)  # converted there: the host would do it in one thread
        target.copy_(memory, non_blocking=self._on_device)
        if self._on_device:
            self._copied[slot].record(torch.accelerator.current_stream(self.device))
