"""Files into tensors on a device, piece by piece through pinned memory: threads fill it while earlier pieces are
copied.

A copy from memory that is not pinned goes through a buffer of the driver, and the host waits for it; and one thread
reads the page cache at a fraction of the bus's rate. So a box is cut into pieces along its first dims, threads read the
next ones, and copies are asynchronous on the current stream. Threads go on with the pieces of the next tensor: most
tensors have only a few.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from parallelize.base.boxes import Box, shape_of
from parallelize.base.files.digests import BLOCK_BYTES
from parallelize.checkpoint.format import header as dtypes

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

        read: writes a part of the box to memory, in any thread. Parts of boxes of one dim begin at multiples of
        `piece_bytes`, or
            with the box.
        Raises: what `read` does, of this or of an earlier box. Outputs then have some of the pieces, and no thread
            reads any more.
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


# -- host memory -----------------------------------------------------------------------------------------------------
# Host memory for reading and writing: the bytes of tensors without a copy, and large buffers in huge pages.


HUGE_BYTES = 2 << 20
_ALIGNED = 64  # bytes: the alignment of PyTorch's allocator
_SMALL_BYTES = 1 << 16
_ADVICE, _UNADVICE = getattr(mmap, "MADV_HUGEPAGE", None), getattr(mmap, "MADV_NOHUGEPAGE", None)
_MAX_SLOW_PAGES, _SLOW_S = 2, 1.5e-3  # of processor time; 512 small pages take about 0.8 ms


def bytes_of(tensor: T) -> memoryview:
    """The memory of a contiguous CPU tensor, writable. The tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """Uninitialized host memory, in huge pages if it is large."""
    return Arena().take(shape, dtype)


class Arena:
    """Uninitialized host memory for many tensors, in huge pages where these are fast.

    The first write to each new page causes a page fault. For 384 MB, the faults of small pages take 0.17 s, longer than
    reading the file; those of huge pages take 0.03 s. In a virtual machine whose host reclaims free memory, a huge page
    may take milliseconds instead (0.9 s in total). Each huge page is therefore timed, and after a few slow ones small
    pages are used.

    Tensors share a mapping, which is freed with the last of them. Each has a storage of its own.
    """

    slow_pages: ClassVar[int] = 0  # huge pages of this process that were slow

    def __init__(self, chunk_bytes: int = 32 * HUGE_BYTES):
        self.chunk_bytes = chunk_bytes
        self._mapping: mmap.mmap | None = None
        self._at = self._stop = self._touched = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> T:
        """A tensor of uninitialized (in practice zero) values."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if _ADVICE is None or num_bytes < _SMALL_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self._mapping is None or self._at + num_bytes > self._stop:
            self._map(max(num_bytes, self.chunk_bytes if num_bytes < self.chunk_bytes // 2 else num_bytes))
        assert self._mapping is not None
        self._touch(self._at + num_bytes)
        data = torch.frombuffer(self._mapping, dtype=torch.uint8, count=num_bytes, offset=self._at)
        self._at += -(-num_bytes // _ALIGNED) * _ALIGNED
        return data.view(dtype).view(shape)

    def _map(self, num_bytes: int) -> None:
        """Create a private mapping, aligned to huge pages."""
        mapping = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._mapping, self._at = mapping, -address % HUGE_BYTES
        self._stop = self._at + num_bytes
        self._touched = self._at
        if Arena.slow_pages < _MAX_SLOW_PAGES:
            mapping.madvise(int(_ADVICE or 0))

    def _touch(self, stop: int) -> None:
        """Write to the huge pages before `stop`, which the caller is about to fill, and time them."""
        assert self._mapping is not None
        while self._touched < stop and Arena.slow_pages < _MAX_SLOW_PAGES:
            start_s = time.thread_time()  # waiting for a core says nothing of the page
            self._mapping[self._touched] = 0
            self._touched += HUGE_BYTES
            if time.thread_time() - start_s > _SLOW_S:
                Arena.slow_pages += 1
                if Arena.slow_pages == _MAX_SLOW_PAGES:
                    self._mapping.madvise(int(_UNADVICE or 0))


class Scratch:
    """A reusable host buffer that grows to the largest size requested."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def of(self, num_bytes: int) -> T:
        """[num_bytes] uint8, valid until the next call."""
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = empty((num_bytes,), torch.uint8)
        return self._buffer[:num_bytes]


def torch_dtype(code: str) -> torch.dtype:
    """The dtype with this name in safetensors files."""
    dtype: torch.dtype = getattr(torch, dtypes.TORCH[code])
    return dtype


def code_of(dtype: torch.dtype) -> str | None:
    """The name of a dtype in safetensors files; None if it has none."""
    return dtypes.CODES.get(str(dtype).removeprefix("torch."))
