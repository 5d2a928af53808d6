"""Host memory for reading and writing: bytes of tensors without a copy, and large buffers without page faults."""

from __future__ import annotations

import ctypes
import math
import mmap
import time
from typing import Any, ClassVar

import torch

from parallelize.checkpoint import dtypes

T = torch.Tensor
HUGE_BYTES = 2 << 20
_ALIGNED = 64  # bytes, as PyTorch aligns its own
_SMALL_BYTES = 1 << 16
_ADVICE, _UNADVICE = getattr(mmap, "MADV_HUGEPAGE", None), getattr(mmap, "MADV_NOHUGEPAGE", None)
_MOST_SLOW, _SLOW_S = 4, 1.5e-3  # 512 small pages take about 0.8 ms


def bytes_of(tensor: T) -> memoryview:
    """The memory of a contiguous CPU tensor, writable. The tensor must live as long as it is used."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> T:
    """Uninitialised host memory, in huge pages where it is large."""
    return Arena().take(shape, dtype)


class Arena:
    """Uninitialised host memory for many tensors, in huge pages where they are cheap.

    First writes to fresh memory cost a fault a page, which takes longer than reading the file: 0.17 s against 0.03 with huge
    pages, for 384 MB. In a virtual machine whose host takes free memory back, a huge page may cost milliseconds instead
    (0.9 s), so each is timed, and after a few slow ones small pages do.

    Tensors share a mapping, which goes when the last of them does; each has a storage of its own.
    """

    slow_pages: ClassVar[int] = 0  # seen by this process

    def __init__(self, chunk_bytes: int = 32 * HUGE_BYTES):
        self.chunk_bytes = chunk_bytes
        self._mapping: mmap.mmap | None = None
        self._at = self._stop = self._touched = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> T:
        """A tensor of uninitialised (in fact zero) values."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if _ADVICE is None or num_bytes < _SMALL_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self._mapping is None or self._at + num_bytes > self._stop:
            self._map(max(num_bytes, self.chunk_bytes if num_bytes < self.chunk_bytes // 2 else num_bytes))
        assert self._mapping is not None
        self._touch(self._at + num_bytes)
        held = torch.frombuffer(self._mapping, dtype=torch.uint8, count=num_bytes, offset=self._at)
        self._at += -(-num_bytes // _ALIGNED) * _ALIGNED
        return held.view(dtype).view(shape)

    def _map(self, num_bytes: int) -> None:
        """A private mapping that begins at a huge page."""
        mapping = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._mapping, self._at = mapping, -begin % HUGE_BYTES
        self._stop = self._at + num_bytes
        self._touched = self._at
        if Arena.slow_pages < _MOST_SLOW:
            mapping.madvise(int(_ADVICE or 0))

    def _touch(self, upto: int) -> None:
        """Write to the huge pages before `upto`, which would be written to anyway; where they are slow, ask for no more."""
        assert self._mapping is not None
        while self._touched < upto and Arena.slow_pages < _MOST_SLOW:
            began = time.perf_counter()
            self._mapping[self._touched] = 0
            self._touched += HUGE_BYTES
            if time.perf_counter() - began > _SLOW_S:
                Arena.slow_pages += 1
                if Arena.slow_pages == _MOST_SLOW:
                    self._mapping.madvise(int(_UNADVICE or 0))


class Scratch:
    """A host buffer that is used again and again, and grows to what was asked of it."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def of(self, num_bytes: int) -> T:
        """[num_bytes] uint8, valid until the next call."""
        if self._held.numel() < num_bytes:
            self._held = torch.empty(0, dtype=torch.uint8)
            self._held = empty((num_bytes,), torch.uint8)
        return self._held[:num_bytes]


def torch_dtype(code: str) -> torch.dtype:
    found: Any = getattr(torch, dtypes.TORCH[code])
    return found


def code_of(dtype: torch.dtype) -> str | None:
    """A dtype's name in safetensors files, None where it has none."""
    return dtypes.CODES.get(str(dtype).removeprefix("torch."))
