"""A folder of checkpoints: names, `latest`, who may write, what is kept.

    ROOT/step-00000100/                 published: complete, and never written again
    ROOT/.step-00000200.writing-<id>/   of a save that goes on, or was cut off
    ROOT/.step-00000050.removing-<id>/  of a removal that was cut off
    ROOT/latest                         the name of the newest
    ROOT/.lock                          held by the run that writes here

Renaming a folder is what publishes it, so the newest published folder is the newest checkpoint; `latest` says the same to
people and to other tools, and comes second. Torch-free.
"""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from pathlib import Path

from parallelize.checkpoint import disk
from parallelize.checkpoint.manifest import NAME
from parallelize.errors import CheckpointError, Problem, short_list

LATEST = "latest"
_PUBLISHED = re.compile(r"step-(\d{8,18})")
_UNFINISHED = re.compile(r"\.step-\d{8,18}\.(writing|removing)-[0-9a-f]{12}|\.latest\.new|\.shared-[0-9a-f]{32}")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def published(root: Path) -> dict[int, Path]:
    """Step -> folder of every checkpoint, oldest first. What has no manifest is none."""
    found = {}
    for path in root.iterdir() if root.is_dir() else ():
        named = _PUBLISHED.fullmatch(path.name)
        if named and not path.is_symlink() and (path / NAME).is_file():
            found[int(named.group(1))] = path
    return dict(sorted(found.items()))


def resolve(folder: str | os.PathLike, step: int | None = None) -> Path:
    """The checkpoint that is meant: the folder itself, or the newest in a folder of them, or that of a step.

    Raises: CheckpointError `no-checkpoint` with what there is.
    """
    root = Path(folder)
    if step is None and (root / NAME).is_file():
        return root
    found = published(root)
    if step is None:
        _check_latest(root, found)
    if step is None and found:
        return list(found.values())[-1]
    if step in found:
        return found[step]
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    there = short_list([str(number) for number in found]) or "none"
    what = f"{root} holds {wanted}" + ("" if root.is_dir() else ": there is no such folder")
    raise CheckpointError(Problem("no-checkpoint", what, rows=(("steps there", there),), fix="check the folder"))


def check_newest(root: Path, step: int) -> None:
    """A run goes forward: among newer checkpoints, retention would take its own for old. Raises: CheckpointError
    `newer-checkpoints`, `already-saved`."""
    found = published(root)
    if step in found:
        fix = "a published checkpoint is never written again: remove it, or save to another folder"
        raise CheckpointError(Problem("already-saved", f"step {step} is there already", str(found[step]), fix=fix))
    newer = [str(one) for one in found if one > step]
    if newer:
        what = f"step {step} is to be saved, and steps {short_list(newer, 6)} are there"
        fix = "use a new folder; or resume(step, set_aside=True), which renames them"
        raise CheckpointError(Problem("newer-checkpoints", what, str(root), fix=fix))


def _check_latest(root: Path, found: dict[int, Path]) -> None:
    """The newest may have lost its manifest: then an older one is not what is wanted. Raises: CheckpointError
    `not-a-checkpoint`."""
    try:
        name = (root / LATEST).read_text(encoding="utf-8")[:64].strip()
    except (OSError, ValueError):
        return
    if _PUBLISHED.fullmatch(name) and (root / name).is_dir() and root / name not in found.values():
        what = f"{LATEST} names {name}, which has no manifest any more"
        fix = "restore it from a copy, or name the step to load"
        raise CheckpointError(Problem("not-a-checkpoint", what, str(root / name), fix=fix))


def unfinished(root: Path) -> list[Path]:
    """What a save or a removal that was cut off has left."""
    return [path for path in root.iterdir() if _UNFINISHED.fullmatch(path.name)]


def begin(root: Path, step: int) -> Path:
    """A new folder to write step's files into. Raises: CheckpointError `already-saved`, `write-failed`."""
    final = root / folder_name(step)
    if os.path.lexists(final):
        fix = "a published checkpoint is never written again: remove it, or save to another folder"
        raise CheckpointError(Problem("already-saved", f"step {step} is there already", str(final), fix=fix))
    path = root / f".{folder_name(step)}.writing-{uuid.uuid4().hex[:12]}"
    with disk.explained(path):
        disk.make_folder(path)
    return path


def publish(root: Path, writing: Path, step: int, manifest: bytes) -> Path:
    """Make what was written a checkpoint: manifest, then the folder's name, then `latest`; each on the disk before the next.

    Raises: CheckpointError `write-failed`, `already-saved`. The folder is then not published; or complete, and it says so.
    """
    final = root / folder_name(step)
    with disk.explained(writing, len(manifest)):
        disk.write_file(writing / NAME, manifest)
        disk.flush_folder(writing)
        if os.path.lexists(final):
            raise CheckpointError(Problem("already-saved", f"step {step} was saved meanwhile", str(final)))
        disk.rename(writing, final)
    with disk.explained(
        final, len(final.name) + 1, f"step {step} is published and complete, but what comes after it failed"
    ):
        disk.flush_folder(root)
        newest = list(published(root).values())[-1]  # an older step may be saved after a newer one
        disk.replace_file(root / LATEST, (newest.name + "\n").encode())
    return final


def abandon(writing: Path | None) -> None:
    """Remove what a failed save has written."""
    if writing is not None:
        disk.remove_folder(writing)


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that half of one is never taken for a whole."""
    gone = path.with_name(f".{path.name}.removing-{uuid.uuid4().hex[:12]}")
    disk.rename(path, gone)
    disk.flush_folder(path.parent)
    disk.remove_folder(gone)


def set_aside(root: Path, step: int) -> None:
    """Rename what was saved after a step, and let `latest` name that step. Raises: CheckpointError `write-failed`."""
    with disk.explained(root):
        for newer, path in published(root).items():
            if newer > step:
                disk.rename(path, path.with_name(f".{path.name}.aside-{uuid.uuid4().hex[:12]}"))
        disk.flush_folder(root)
        disk.replace_file(root / LATEST, (folder_name(step) + "\n").encode())


def surplus(steps: list[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """The steps that retention removes: all but the last n, and every k-th. The newest stays always."""
    if keep_last is None:
        return []
    kept = set(sorted(steps)[-max(1, keep_last) :])
    return [step for step in sorted(steps) if step not in kept and not (keep_every and step % keep_every == 0)]


class Lock:
    """The right to write into a folder: one run at a time. It ends with the process, however that ends."""

    def __init__(self, root: Path):
        """Raises: CheckpointError `folder-in-use`, `write-failed`."""
        with disk.explained(root):
            new = [path for path in (root, *root.parents) if not path.exists()]
            root.mkdir(parents=True, exist_ok=True)
            for path in new:  # or a checkpoint would be on the disk, and the way to it not
                disk.flush_folder(path.parent)
            self._file = os.open(root / ".lock", os.O_CREAT | os.O_RDWR | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            import fcntl
        except ImportError:  # no such locks on this system
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            what = "another run writes its checkpoints here"
            fix = "give each run a folder of its own, or wait until the other has ended"
            raise CheckpointError(Problem("folder-in-use", what, str(root), fix=fix)) from None
        except OSError:  # a file system without locks
            return

    def release(self) -> None:
        if self._file >= 0:
            with suppress(ImportError, OSError):  # forks that live on (workers of a data loader) hold the file open
                import fcntl

                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1
