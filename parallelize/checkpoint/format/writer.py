"""Writing one safetensors file, one tensor at a time. Blocks are hashed while others are written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from parallelize.base.files.digests import BLOCK_BYTES, digest_metadata, digest_of, placeholder_metadata
from parallelize.checkpoint.format import disk
from parallelize.checkpoint.format.device_pieces import bytes_of
from parallelize.checkpoint.format.header import FileInfo, Header, build_header

T = torch.Tensor
_INLINE_BYTES = 1 << 16  # smaller blocks are hashed by the writing thread: a task of the pool costs more
_EARLY_FLUSH_BYTES = 16 << 20
_MAX_PENDING = 8  # blocks that are written and not yet hashed


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to write. `make` returns its values, on any device and with any strides; it is called once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], T]


def write_tensors(
    path: Path,
    tensors: Sequence[TensorToWrite],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> FileInfo:
    """Create a file with these tensors, in this order, and flush it to the disk.

    Memory: one tensor, if `make` returns copies or tensors of another device.

    Args:
        path: the path of the new file.
        tensors: the tensors to write.
        metadata: the metadata of the header, text by name.
        progress: called with the number of bytes after each write.

    Raises: CheckpointError `write-failed` with path, cause, needed and free bytes. The incomplete file is not removed.
    """
    described = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    blank = build_header(described, metadata or {})
    sizes = {name: entry.num_bytes for name, entry in blank.entries.items()}
    header = build_header(described, {**(metadata or {}), **placeholder_metadata(sizes)})
    total = len(header.raw) + sum(sizes.values())
    with disk.reporting_errors(path, total), ExitStack() as stack:
        descriptor = disk.create(path)
        stack.callback(disk.close, descriptor)
        pool = stack.enter_context(ThreadPoolExecutor(1, "hash"))
        disk.write(descriptor, header.raw)
        flushing = _EarlyFlush(descriptor, len(header.raw))
        write = partial(_write_tensor, descriptor, pool=pool, flushing=flushing, progress=progress)
        blocks = {tensor.name: write(tensor) for tensor in tensors}
        digests = {name: "".join(digest() for digest in parts) for name, parts in blocks.items()}
        final = build_header(described, {**(metadata or {}), **digest_metadata(digests)})
        _check_length(header, final)
        disk.write_at(descriptor, final.raw, 0)
        disk.flush(descriptor)
    return FileInfo(path.name, total, digest_of(final.raw))


class _EarlyFlush:
    """Starts flushing before the file is complete: 0.22 s instead of 0.31 for 384 MB."""

    def __init__(self, descriptor: int, start: int):
        self.descriptor, self.flushed, self.written = descriptor, start, start

    def wrote(self, num_bytes: int) -> None:
        self.written += num_bytes
        if self.written - self.flushed >= _EARLY_FLUSH_BYTES:
            disk.begin_flush(self.descriptor, self.flushed, self.written - self.flushed)
            self.flushed = self.written


def _check_length(reserved: Header, final: Header) -> None:
    assert len(reserved.raw) == len(final.raw), "the header with digests differs in length from the reserved space"


def _submit_hash(pool: ThreadPoolExecutor, block: memoryview) -> Future[str]:
    try:
        return pool.submit(digest_of, block)
    except RuntimeError:  # the interpreter is shutting down and accepts no tasks; complete this save without the pool
        done: Future[str] = Future()
        done.set_result(digest_of(block))
        return done


def _write_tensor(
    descriptor: int,
    item: TensorToWrite,
    *,
    pool: ThreadPoolExecutor,
    flushing: _EarlyFlush,
    progress: Callable[[int], None] | None,
) -> list[Callable[[], str]]:
    """Write a tensor. Returns one function per block, which waits for the digest of the block."""
    tensor = item.make().detach()
    assert tuple(tensor.shape) == tuple(item.shape), f"{item.name} has the shape {list(tensor.shape)}"
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    tensor = tensor.contiguous().resolve_conj().resolve_neg()
    data, pending = bytes_of(tensor), deque[Future[str]]()
    digests: list[Callable[[], str]] = []
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        if len(block) <= _INLINE_BYTES:
            digest = digest_of(block)
            digests.append(partial(str, digest))
        else:
            future = _submit_hash(pool, block)
            digests.append(future.result)
            pending.append(future)
        disk.write(descriptor, block)
        flushing.wrote(len(block))
        if progress is not None:
            progress(len(block))
        if len(pending) > _MAX_PENDING:
            pending.popleft().result()
    for future in pending:  # the caller may reuse the memory of the tensor after this returns
        future.result()
    return digests
