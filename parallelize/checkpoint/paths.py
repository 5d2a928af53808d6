"""Opening files of a checkpoint: by base name, inside its folder, and nothing but regular files.

An index comes from outside, so the names in it may point anywhere. Torch-free.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from parallelize.errors import CheckpointError, Problem


def check_name(name: object, where: str) -> str:
    """A file name that stays in its folder. Raises: CheckpointError `unsafe-path`."""
    fine = isinstance(name, str) and name not in ("", ".", "..") and len(name) < 256
    if not fine or any(c in str(name) for c in "/\\\0:") or not str(name).isprintable():
        shown = repr(name)[:120]
        raise CheckpointError(
            Problem("unsafe-path", f"{shown} is not the name of a file in the same folder", where, fix="get it anew")
        )
    return str(name)


def open_file(folder: Path, name: str) -> tuple[int, int]:
    """(descriptor, bytes) of a regular file in `folder`.

    Links are refused, but those of the Hugging Face cache, whose snapshots link to `blobs` beside them.

    Raises: CheckpointError `unsafe-path`, `missing-file`, `unreadable-file`.
    """
    path = folder / check_name(name, str(folder))
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            path = _linked(folder, path)
            found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(Problem("unsafe-path", "is not a regular file", str(path), fix="get it anew"))
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise CheckpointError(
            Problem("missing-file", f"{name} is not there", str(folder), fix="the copy is not complete: get it anew")
        ) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, as Python 3.11 has it
        what = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(Problem("unreadable-file", what, str(path))) from error
    return descriptor, os.fstat(descriptor).st_size


def _linked(folder: Path, path: Path) -> Path:
    target, home = path.resolve(), folder.resolve()
    of_cache = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if target.parent != home and not of_cache:
        what = f"links to {target}, outside of its folder"
        raise CheckpointError(Problem("unsafe-path", what, str(path), fix="copy the file into the folder"))
    return target


def read_small(folder: Path, name: str, most: int = 256 << 20) -> bytes:
    """A whole text file. Raises: as `open_file`, and CheckpointError `oversized-file`, `bad-text` for NUL bytes: a sparse file
    cannot make this read much."""
    descriptor, size = open_file(folder, name)
    try:
        if size > most:
            what = f"has {size} bytes, more than the {most} that such a file may have"
            raise CheckpointError(Problem("oversized-file", what, str(folder / name)))
        parts = []
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            while part := file.read(1 << 20):
                if b"\0" in part:
                    raise CheckpointError(Problem("bad-text", "has NUL bytes", str(folder / name), fix="get it anew"))
                parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)
