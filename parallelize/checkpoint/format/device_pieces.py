"""Files into tensors on a device, piece by piece through pinned memory: threads fill it while earlier pieces are copied.

A copy from memory that is not pinned goes through a buffer of the driver, and the host waits for it; and one thread reads the page
cache at a fraction of the bus's rate. So a box is cut into pieces along its first dims, threads read the next ones, and copies are
asynchronous on the current stream. Threads go on with the pieces of the next tensor: most tensors have only a few.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from parallelize.base.files.boxes import Box, shape_of
from parallelize.base.files.digests import BLOCK_BYTES
from parallelize.checkpoint.format.host_memory import bytes_of

T = torch.Tensor
PIECE_BYTES = 2 * BLOCK_BYTES
_SLOTS, _THREADS = 16, 8
Read = Callable[[Box, memoryview], None]


@dataclass(frozen=True)
class _Piece:
    """A piece that a thread reads, and the elements on the device that it is for."""

    read: Future
    memory: T
    target: T
    slot: int


class DevicePieces:
    """Slots of pinned memory, each of which is read into and copied from in turn. Used by one thread.

    Args:
        device: where tensors are; those of the CPU are copied to without pinned memory.
        piece_bytes: the size of a slot.

    Memory: at most 16 pieces of 8 MiB, which PyTorch's allocator of pinned memory keeps for the process.
    """

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES):
        self.device, self.piece_bytes = device, piece_bytes
        self._on_device = device.type != "cpu"
        self._slots: list[tuple[T, Any]] = []  # memory, and the event after its last copy to the device
        self._pieces: deque[_Piece] = deque()
        self._next_slot = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="read")

    def fill(self, read: Read, box: Box, dtype: torch.dtype, out: T) -> None:
        """Begin to read a box, of one dim at least, whose elements have a dtype, into `out`, of any dtype.

        After `finish`, `out` is ready for operations on the current stream alone.

        read: writes a part of the box to memory, in any thread. Parts of boxes of one dim begin at multiples of `piece_bytes`, or
            with the box.
        Raises: what `read` does, of this or of an earlier box. Outputs then have some of the pieces, and no thread reads any more.
        """
        try:
            for part, target in self._parts(box, dtype, out):
                if len(self._pieces) == _SLOTS:
                    self._copy_first()
                memory = self._free_slot()[: target.numel() * dtype.itemsize].view(dtype).view(target.shape)
                future = self._threads.submit(read, part, bytes_of(memory))
                self._pieces.append(_Piece(future, memory, target, self._next_slot))
                self._next_slot = (self._next_slot + 1) % _SLOTS
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> None:
        """Copy what is still read. Raises: as `fill`."""
        try:
            while self._pieces:
                self._copy_first()
        except BaseException:
            self.abandon()
            raise

    def wait_for_reads(self) -> None:
        """Return when no thread reads. Errors are kept for `finish`."""
        wait([piece.read for piece in self._pieces])

    def abandon(self) -> None:
        """Forget what is not copied yet, after its reads."""
        self.wait_for_reads()
        self._pieces.clear()

    def _free_slot(self) -> T:
        """The memory of the next slot, once the device has copied what was there. It is allocated at its first use."""
        if self._next_slot == len(self._slots):
            memory = torch.empty(self.piece_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._on_device)
            self._slots.append((memory, torch.Event(self.device) if self._on_device else None))
            return memory
        memory, copied = self._slots[self._next_slot]
        if self._on_device:
            copied.synchronize()
        return memory

    def _parts(self, box: Box, dtype: torch.dtype, out: T) -> Iterator[tuple[Box, T]]:
        """Parts of a box that fit a slot, and their elements of `out`."""
        (start, stop), *rest = box
        row_bytes = math.prod(shape_of(box)[1:]) * dtype.itemsize
        if row_bytes > self.piece_bytes:
            for index in range(start, stop):
                for part, target in self._parts(tuple(rest), dtype, out[index - start]):
                    yield ((index, index + 1), *part), target.unsqueeze(0)
            return
        rows, first = self.piece_bytes // max(1, row_bytes), start
        while first < stop:
            last = min((first // rows + 1) * rows, stop)
            yield ((first, last), *rest), out[first - start : last - start]
            first = last

    def _copy_first(self) -> None:
        """Copy the piece that was begun first, and forget it."""
        piece = self._pieces[0]
        piece.read.result()
        self._pieces.popleft()  # now, so that an interrupted wait leaves it among those that are waited for
        memory = piece.memory
        if memory.dtype != piece.target.dtype and self._on_device:
            memory = memory.to(self.device, non_blocking=True)  # converted there: the host would do it in one thread
        piece.target.copy_(memory, non_blocking=self._on_device)
        if self._on_device:
            self._slots[piece.slot][1].record(torch.accelerator.current_stream(self.device))
