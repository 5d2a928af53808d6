"""Writing one safetensors file: tensor by tensor, hashed while it is written, flushed to the disk at the end."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint import disk
from parallelize.checkpoint.digests import BLOCK_BYTES, digest_of, placeholder, written
from parallelize.checkpoint.header import FileInfo, Header, build_header
from parallelize.checkpoint.memory import bytes_of

T = torch.Tensor
_INLINE_BYTES = 1 << 16  # smaller blocks are hashed at once: handing them over costs more
_FLUSHED_BYTES = 16 << 20
_MOST_WAITING = 8  # blocks that are written and not hashed yet


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write. `make`: its values, any device and strides; called once, when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], T]


def write_tensors(
    path: Path,
    tensors: Sequence[Outgoing],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> FileInfo:
    """Write a new file of these tensors, in this order, and flush it.

    Memory: one tensor beyond what `make` gives without a copy. `progress` is told of bytes written.

    Raises: CheckpointError `write-failed` with path, cause, needed and free bytes. The file is then left as it is.
    """
    described = {one.name: (one.dtype, one.shape) for one in tensors}
    blank = build_header(described, metadata or {})
    sizes = {name: entry.num_bytes for name, entry in blank.entries.items()}
    header = build_header(described, {**(metadata or {}), **placeholder(sizes)})
    total = len(header.raw) + sum(sizes.values())
    with disk.explained(path, total), ExitStack() as stack:
        descriptor = disk.create(path)
        stack.callback(os.close, descriptor)
        pool = stack.enter_context(ThreadPoolExecutor(1, "hash"))
        disk.write(descriptor, header.raw)
        flushing = _EarlyFlush(descriptor, len(header.raw))
        found = {one.name: _write_one(descriptor, one, pool, flushing, progress) for one in tensors}
        digests = {name: "".join(take() for take in taken) for name, taken in found.items()}
        final = build_header(described, {**(metadata or {}), **written(digests)})
        _check_room(header, final)
        disk.write_at(descriptor, final.raw, 0)
        disk.flush(descriptor)
    return FileInfo(path.name, total, digest_of(final.raw))


class _EarlyFlush:
    """Lets the disk begin before everything is written: 0.22 s instead of 0.31 for 384 MB."""

    def __init__(self, descriptor: int, start: int):
        self.descriptor, self.begun, self.written = descriptor, start, start

    def wrote(self, num_bytes: int) -> None:
        self.written += num_bytes
        if self.written - self.begun >= _FLUSHED_BYTES:
            disk.begin_flush(self.descriptor, self.begun, self.written - self.begun)
            self.begun = self.written


def _check_room(blank: Header, final: Header) -> None:
    assert len(blank.raw) == len(final.raw), "digests took another length than was kept for them"


def _hashed_beside(pool: ThreadPoolExecutor, block: memoryview) -> Any:
    try:
        return pool.submit(digest_of, block)
    except RuntimeError:  # the interpreter is ending, and this save goes on to its end
        done: Any = Future()
        done.set_result(digest_of(block))
        return done


def _write_one(
    descriptor: int,
    one: Outgoing,
    pool: ThreadPoolExecutor,
    flushing: _EarlyFlush,
    progress: Callable[[int], None] | None,
) -> list[Callable[[], str]]:
    """Write a tensor; what it returns gives the digest of each block."""
    tensor = one.make().detach()
    assert tuple(tensor.shape) == tuple(one.shape), f"{one.name} has become {list(tensor.shape)}"
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.contiguous().resolve_conj().resolve_neg()
    data, waiting = bytes_of(tensor), deque[Future]()
    digests: list[Callable[[], str]] = []
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        if len(block) <= _INLINE_BYTES:
            digest = digest_of(block)
            digests.append(partial(str, digest))
        else:
            future = _hashed_beside(pool, block)
            digests.append(future.result)
            waiting.append(future)
        disk.write(descriptor, block)
        flushing.wrote(len(block))
        if progress is not None:
            progress(len(block))
        if len(waiting) > _MOST_WAITING:
            waiting.popleft().result()
    for future in waiting:  # the memory may be another's once this returns
        future.result()
    return digests
