"""What changes a file system, in small steps that may each fail or be the last: tests stop the process between any two.

Torch-free.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from parallelize.errors import CheckpointError, Problem


@contextmanager
def explained(path: Path, needed_bytes: int = 0, what: str = "cannot write a checkpoint") -> Iterator[None]:
    """An operating system's error, as one of this package that names path, cause and room. Raises: CheckpointError
    `write-failed`."""
    try:
        yield
    except OSError as error:
        rows = [("path", str(path)), ("cause", f"{error.strerror or error} (errno {error.errno})")]
        if needed_bytes:
            rows.append(("needs", f"{needed_bytes:,} bytes; free: {_free(path):,}"))
        fix = "make room, or save elsewhere; what was saved before is as it was"
        raise CheckpointError(Problem("write-failed", what, "", tuple(rows), fix)) from error


def _free(path: Path) -> int:
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return 0


def create(path: Path) -> int:
    """A new file, open for writing. One that exists is never opened again."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), 0o644)


def write(descriptor: int, data: Any) -> None:
    """All of it."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


def write_at(descriptor: int, data: Any, at: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        done = os.pwrite(descriptor, view, at)
        view, at = view[done:], at + done


def begin_flush(descriptor: int, start: int, length: int) -> None:
    """Ask that these bytes go to the disk from now on, so that the disk works while others are copied and hashed.

    A hint: `flush` is what waits, and tells of errors. Linux has it.
    """
    begin: Any = getattr(ctypes.CDLL(None), "sync_file_range", None) if os.name == "posix" else None
    if begin is not None:
        begin(ctypes.c_int(descriptor), ctypes.c_int64(start), ctypes.c_int64(length), ctypes.c_uint(_BEGIN_WRITING))


_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE


def flush(descriptor: int) -> None:
    """To the disk."""
    os.fsync(descriptor)


def flush_folder(path: Path) -> None:
    """The names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    os.mkdir(path)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def replace(source: Path, target: Path) -> None:
    os.replace(source, target)


def write_file(path: Path, data: bytes) -> None:
    """A small new file, flushed."""
    descriptor = create(path)
    try:
        write(descriptor, data)
        flush(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """A small file's content, at once: who reads it finds the old or the new, never a part."""
    beside = path.with_name(f".{path.name}.new")
    remove_file(beside)
    try:
        write_file(beside, data)
        replace(beside, path)
    except OSError:
        with suppress(OSError):
            remove_file(beside)
        raise
    flush_folder(path.parent)


def remove_file(path: Path) -> None:
    path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    """With all that is in it, or a file; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        remove_file(path)
