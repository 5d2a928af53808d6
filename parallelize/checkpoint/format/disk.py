"""The operations that change the file system. Each is one small step, so that tests can stop a process between any two.

Does not import torch.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from parallelize.base.errors import CheckpointError, Problem


@contextmanager
def reporting_errors(path: Path, needed_bytes: int = 0, what: str = "cannot write a checkpoint") -> Iterator[None]:
    """Convert an OSError into a CheckpointError `write-failed` that names path, cause and free space."""
    try:
        yield
    except OSError as error:
        rows = [("path", str(path)), ("cause", f"{error.strerror or error} (errno {error.errno})")]
        if needed_bytes:
            rows.append(("needs", f"{needed_bytes:,} bytes; free: {_free(path):,}"))
        fix = "free some space, or save to another folder; earlier checkpoints are not affected"
        raise CheckpointError(Problem("write-failed", what, "", tuple(rows), fix)) from error


def _free(path: Path) -> int:
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return 0


def create(path: Path) -> int:
    """Create a file and open it for writing. Fails if it exists."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), 0o644)


def write(descriptor: int, data: Any) -> None:
    """Write all of `data`."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def write_at(descriptor: int, data: Any, at: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count


def begin_flush(descriptor: int, start: int, length: int) -> None:
    """Ask the kernel to start writing these bytes to the disk, so that this overlaps with copying and hashing.

    A hint, on Linux only. `flush` waits for the disk and reports errors.
    """
    begin: Any = getattr(ctypes.CDLL(None), "sync_file_range", None) if os.name == "posix" else None
    if begin is not None:
        begin(ctypes.c_int(descriptor), ctypes.c_int64(start), ctypes.c_int64(length), ctypes.c_uint(_BEGIN_WRITING))


_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE


def flush(descriptor: int) -> None:
    """Write the file to the disk, and wait."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Close a file or folder, without an error.

    `flush` has waited for the disk and reported its errors before, so that what a close may still report is of no
    content. An error here would fail a save on the rank that closes after the checkpoint has been published.
    """
    with suppress(OSError):
        os.close(descriptor)


def flush_folder(path: Path) -> None:
    """Write the entries of a folder to the disk, and wait."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        close(descriptor)


def make_folder(path: Path) -> None:
    os.mkdir(path)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def replace(source: Path, target: Path) -> None:
    os.replace(source, target)


def write_file(path: Path, data: bytes) -> None:
    """Create a small file and flush it."""
    descriptor = create(path)
    try:
        write(descriptor, data)
        flush(descriptor)
    finally:
        close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a small file atomically."""
    temporary = path.with_name(f".{path.name}.new")
    remove_file(temporary)
    try:
        write_file(temporary, data)
        replace(temporary, path)
    except OSError:
        with suppress(OSError):
            remove_file(temporary)
        raise
    flush_folder(path.parent)


def remove_file(path: Path) -> None:
    path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder with its contents, or a file. What cannot be removed remains, without an error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        remove_file(path)
