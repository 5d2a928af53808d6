"""Host memory for reading and writing: the bytes of tensors without a copy, and large buffers in huge pages."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from typing import ClassVar

import torch

from parallelize.checkpoint.format import dtypes

T = torch.Tensor
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
    may take milliseconds instead (0.9 s in total). Each huge page is therefore timed, and after a few slow ones small pages
    are used.

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
