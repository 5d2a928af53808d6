"""Sums and gathers of small CPU tensors through memory that all ranks of a group have mapped: microseconds instead of
gloo's hundreds.

Each rank has two slots and a counter. The n-th exchange writes this rank's tensor to its slot n mod 2, then n to its
counter, and waits until every counter is at least n. A rank whose counter is n has read what was exchanged before, so
that slot n mod 2 is free again when all counters have reached n - 1. Every rank reads the slots in the order of ranks,
so all of them get the same bits.

The order of the two writes is what other ranks see on x86-64 alone, so it is used there alone (`is_supported`). Each
rank locks one byte of the file for as long as it has the memory, by which a rank that waits knows of one that has ended
or failed.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from contextlib import suppress
from typing import ClassVar

import torch
import torch.distributed as dist

from parallelize.base.errors import HandshakeError, Problem

with suppress(ImportError):  # not on Windows, which has no /dev/shm either
    import fcntl

T = torch.Tensor
SLOT_BYTES = 1 << 18  # larger tensors are exchanged in chunks, each of which stays in a cache of the core
_PAGE_BYTES = 4096
_COUNTER_WORDS = 8  # a cache line for each counter
_SPINS = 300
_YIELDING_S = 0.002
_PAUSE_S = 5e-5
_CHECK_S = 0.5
DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8))


def is_supported() -> bool:
    """Whether this machine's stores become visible in their order, and its processes can map the same memory."""
    return os.path.isdir("/dev/shm") and platform.machine().lower() in ("x86_64", "amd64")


def file_bytes(size: int) -> int:
    """Bytes that a group of `size` ranks maps."""
    return _PAGE_BYTES + 2 * size * SLOT_BYTES


class SharedMemory:
    """One rank's view of the memory that the ranks of a group share. Calls match over ranks as those of collectives do.

    Args:
        descriptor: an open file of `file_bytes(size)` zeros, the same on every rank. It is closed with this object.
        rank, size: this rank's index, and the number of ranks, at most 64.
        timeout_s: seconds to wait for another rank.

    Raises: OSError where the file cannot be mapped or locked.
    """

    active: ClassVar[dict[dist.ProcessGroup, SharedMemory]] = {}
    """What collectives of `blocking` use instead of these process groups."""
    is_allowed: ClassVar[bool] = True
    """False while a watch records calls of process groups, which these are not."""

    def __init__(self, descriptor: int, rank: int, size: int, timeout_s: float):
        self._descriptor, self._rank, self._size, self._timeout_s = descriptor, rank, size, timeout_s
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        memory = mmap.mmap(descriptor, file_bytes(size))
        self._counters = memoryview(memory)[: size * _COUNTER_WORDS * 8].cast("Q")
        with torch.inference_mode(False):  # else no tensor of it could be written to outside of that mode
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._peers = [peer for peer in range(size) if peer != rank]
        self._count = 0
        self._views: dict[tuple[torch.dtype, int], list[list[T]]] = {}

    def __del__(self) -> None:
        os.close(self._descriptor)

    def takes(self, x: T) -> bool:
        """Whether a tensor can be exchanged: equal on all ranks, because it depends on dtype and device alone."""
        return x.dtype in DTYPES and x.device.type == "cpu"

    def reduce(self, x: T, *, largest: bool = False) -> None:
        """Sum a contiguous tensor over ranks, in place, in the order of ranks; or take the maximum of each element.

        Raises: HandshakeError `ranks-missing`.
        """
        combine, flat = torch.maximum if largest else torch.add, x.view(-1)
        for chunk in flat.split(SLOT_BYTES // x.element_size()) if x.nbytes > SLOT_BYTES else (flat,):
            first, second, *others = self._exchange(chunk)
            combine(first, second, out=chunk)
            for other in others:
                combine(chunk, other, out=chunk)

    def all_gather(self, out: T, x: T) -> None:
        """Contiguous [n, ...] on each rank -> contiguous `out` [size * n, ...]. Raises: HandshakeError
        `ranks-missing`."""
        flat, rows, start = x.view(-1), out.view(self._size, -1), 0
        for chunk in flat.split(SLOT_BYTES // x.element_size()) if x.nbytes > SLOT_BYTES else (flat,):
            for row, shard in zip(rows, self._exchange(chunk), strict=True):
                row[start : start + chunk.numel()].copy_(shard)
            start += chunk.numel()

    def _exchange(self, chunk: T) -> list[T]:
        """Every rank's chunk, by rank. They are valid until the next but one exchange."""
        self._count = count = self._count + 1
        slots = self._slots(chunk.dtype, chunk.numel())[count & 1]
        slots[self._rank].copy_(chunk)
        counters = self._counters
        counters[self._rank * _COUNTER_WORDS] = count
        for peer in self._peers:
            if counters[peer * _COUNTER_WORDS] < count:
                self._wait(peer, count)
        return slots

    def _slots(self, dtype: torch.dtype, count: int) -> list[list[T]]:
        """Flat tensors of `count` elements in the slots: [even, odd] exchanges, by rank."""
        slots = self._views.get((dtype, count))
        if slots is None:
            if len(self._views) > 64:
                self._views.clear()
            begins = range(_PAGE_BYTES, len(self._bytes), SLOT_BYTES)
            views = [self._bytes[begin : begin + count * dtype.itemsize].view(dtype) for begin in begins]
            slots = self._views[dtype, count] = [views[: self._size], views[self._size :]]
        return slots

    def _wait(self, peer: int, count: int) -> None:
        counters, index = self._counters, peer * _COUNTER_WORDS
        for _ in range(_SPINS):
            if counters[index] >= count:
                return
        began = last_check = time.monotonic()
        while counters[index] < count:
            now = time.monotonic()
            if now - began < _YIELDING_S:
                os.sched_yield()
                continue
            time.sleep(_PAUSE_S)
            if now - last_check > _CHECK_S:
                self._check(peer, now - began)
                last_check = now

    def _check(self, peer: int, waited_s: float) -> None:
        """Raises: HandshakeError `ranks-missing` where a rank has let go of its memory, or does not come in time."""
        if self._has_ended(peer):
            what = (
                f"rank {peer} of the group has ended, or has left this call with an error, and rank {self._rank} waits "
                "for it"
            )
        elif waited_s > self._timeout_s:
            what = f"rank {peer} of the group did not come within {self._timeout_s:g} s"
        else:
            return
        raise HandshakeError(Problem("ranks-missing", what, fix="look at that rank's own error"))

    def _has_ended(self, peer: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, peer)
        except OSError:
            return False  # its process has the lock
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, peer)
        return True
