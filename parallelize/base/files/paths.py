"""Opening files of a checkpoint: regular files of its folder only, by base name.

The names come from an index that is not trusted, so they could be paths to any file. Does not import torch.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from parallelize.base.errors import CheckpointError, Problem

_FIX = "copy or download it again"


def check_name(name: object, where: str) -> str:
    """Check that `name` is the base name of a file. Raises: CheckpointError `unsafe-path`."""
    is_plain = isinstance(name, str) and name not in ("", ".", "..") and len(name) < 256
    if not is_plain or any(c in str(name) for c in "/\\\0:") or not str(name).isprintable():
        shown = repr(name)[:120]
        raise CheckpointError(
            Problem("unsafe-path", f"{shown} is not the name of a file in the same folder", where, fix=_FIX)
        )
    return str(name)


def open_file(folder: Path, name: str) -> tuple[int, int]:
    """(descriptor, number of bytes) of a regular file in `folder`.

    Links out of the folder are refused, except those of snapshots in the Hugging Face cache to its folder `blobs`.

    Raises: CheckpointError `unsafe-path`, `missing-file`, `unreadable-file`.
    """
    path = folder / check_name(name, str(folder))
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            path = _linked(folder, path)
            status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(Problem("unsafe-path", "is not a regular file", str(path), fix=_FIX))
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise CheckpointError(
            Problem("missing-file", f"{name} does not exist", str(folder), fix=f"the copy is incomplete: {_FIX}")
        ) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links, in Python 3.11
        what = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(Problem("unreadable-file", what, str(path))) from error
    return descriptor, os.fstat(descriptor).st_size


def read_named(path: Path, max_bytes: int) -> bytes:
    """The content of a file that a user names: a link may lead anywhere, and it may be the pipe of a shell
    (`<(command)`).

    Raises: OSError; CheckpointError `unsafe-path` for a named pipe, which would wait for a writer, or a device;
        `oversized-file`.
    """
    status = os.stat(path)
    is_of_shell = stat.S_ISFIFO(status.st_mode) and not path.resolve().exists()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or is_of_shell):
        raise CheckpointError(Problem("unsafe-path", "is not a regular file", str(path), fix="name a file"))
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        what = f"has more than the {max_bytes} bytes that are allowed for it"
        raise CheckpointError(Problem("oversized-file", what, str(path), fix="name a smaller file"))
    return content


def copy_file(folder: Path, name: str, target: Path) -> None:
    """Copy a regular file of a folder to a new file, and flush it. Raises: OSError, and as `open_file`."""
    descriptor, _ = open_file(folder, name)
    with os.fdopen(descriptor, "rb") as source, open(target, "xb") as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
        copy.flush()
        os.fsync(copy.fileno())


def _linked(folder: Path, path: Path) -> Path:
    """The target of a link. Raises: CheckpointError `unsafe-path`."""
    target, home = path.resolve(), folder.resolve()
    is_cache = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if target.parent != home and not is_cache:
        what = f"links to {target}, outside its folder"
        raise CheckpointError(Problem("unsafe-path", what, str(path), fix="copy the file into the folder"))
    return target


def read_small(folder: Path, name: str, max_bytes: int = 256 << 20) -> bytes:
    """The content of a text file. Stops at the first NUL byte, so that a sparse file costs little memory.

    Raises: as `open_file`, and CheckpointError `oversized-file`, `bad-text` for NUL bytes.
    """
    descriptor, size = open_file(folder, name)
    try:
        if size > max_bytes:
            what = f"has {size} bytes, more than the {max_bytes} that are allowed for it"
            raise CheckpointError(Problem("oversized-file", what, str(folder / name)))
        parts = []
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            while part := file.read(1 << 20):
                if b"\0" in part:
                    raise CheckpointError(Problem("bad-text", "has NUL bytes", str(folder / name), fix=_FIX))
                parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)
