"""A folder of checkpoints: its names, the file `latest`, the lock, and retention.

    ROOT/step-00000100/                 published: complete, and never written again
    ROOT/.step-00000200.writing-<id>/   a save that is running, or was interrupted
    ROOT/.step-00000050.removing-<id>/  a removal that was interrupted
    ROOT/latest                         the name of the newest checkpoint
    ROOT/.lock                          locked by the run that writes to this folder

Renaming a folder publishes it. The newest published folder is therefore the newest checkpoint; `latest` is written
after that, for people and other tools. Does not import torch.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelize.base.agreement import named_ranks
from parallelize.base.errors import CheckpointError, Problem, short_list
from parallelize.base.files.paths import read_small
from parallelize.checkpoint.format import disk
from parallelize.checkpoint.format.manifest import NAME, Manifest
from parallelize.checkpoint.format.saved_slices import files_of

LATEST = "latest"
_PUBLISHED = re.compile(r"step-(\d{8,18})")
_UNFINISHED = re.compile(r"\.step-\d{8,18}\.(writing|removing)-[0-9a-f]{12}|\.latest\.new|\.shared-[0-9a-f]{32}")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """The file that a rank writes. `rank`: its index in the mesh."""
    return f"rank-{rank:05d}.safetensors"


def published(root: Path) -> dict[int, Path]:
    """Step -> folder of every checkpoint, oldest first. A folder without a manifest is not a checkpoint."""
    steps = {}
    for path in root.iterdir() if root.is_dir() else ():
        match = _PUBLISHED.fullmatch(path.name)
        if match and not path.is_symlink() and (path / NAME).is_file():
            steps[int(match.group(1))] = path
    return dict(sorted(steps.items()))


def resolve(folder: str | os.PathLike, step: int | None = None) -> Path:
    """The folder of one checkpoint: `folder` itself, or the newest checkpoint in it, or that of `step`.

    Raises: CheckpointError `no-checkpoint`, `not-a-checkpoint`.
    """
    root = Path(folder)
    if step is None and (root / NAME).is_file():
        return root
    steps = published(root)
    if step is None:
        _check_latest(root, steps)
    if step is None and steps:
        return list(steps.values())[-1]
    if step in steps:
        return steps[step]
    missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    what = f"{root} contains {missing}" + ("" if root.is_dir() else ": the folder does not exist")
    rows = (("existing steps", short_list([str(number) for number in steps]) or "none"),)
    raise CheckpointError(Problem("no-checkpoint", what, rows=rows, fix="check the folder"))


def check_newest(root: Path, step: int) -> None:
    """Check that a save of `step` would be the newest. Otherwise retention would remove it in favor of newer steps.

    Raises: CheckpointError `newer-checkpoints`, `already-saved`.
    """
    steps = published(root)
    if step in steps:
        fix = "a published checkpoint is never written again: remove it, or save to another folder"
        raise CheckpointError(Problem("already-saved", f"step {step} exists already", str(steps[step]), fix=fix))
    newer = [str(other) for other in steps if other > step]
    if newer:
        what = f"step {step} is to be saved, and the newer steps {short_list(newer, 6)} exist"
        fix = "use a new folder; or resume(step, set_aside=True), which renames them"
        raise CheckpointError(Problem("newer-checkpoints", what, str(root), fix=fix))


def _check_latest(root: Path, steps: dict[int, Path]) -> None:
    """If the newest checkpoint has lost its manifest, an older one must not be loaded in its place.

    Raises: CheckpointError `not-a-checkpoint`.
    """
    try:
        name = read_small(root, LATEST, 1 << 10).decode()[:64].strip()
    except (CheckpointError, ValueError):
        return
    if _PUBLISHED.fullmatch(name) and (root / name).is_dir() and root / name not in steps.values():
        what = f"{LATEST} names {name}, which no longer has a manifest"
        fix = "restore it from a copy, or name the step to load"
        raise CheckpointError(Problem("not-a-checkpoint", what, str(root / name), fix=fix))


def unfinished(root: Path) -> list[Path]:
    """The folders that remain after interrupted saves and removals."""
    return [path for path in root.iterdir() if _UNFINISHED.fullmatch(path.name)]


def prepared(root: Path) -> dict[Path, int]:
    """Folder -> step of the saves that were interrupted after their manifest was written."""
    complete = [path for path in unfinished(root) if ".writing-" in path.name and (path / NAME).is_file()]
    return {path: int(path.name.split(".")[1].removeprefix("step-")) for path in complete}


def begin(root: Path, step: int, name: str | None = None) -> Path:
    """Create the folder into which a save writes. `name`: that of the same folder on another node.

    Raises: CheckpointError `already-saved`, `write-failed`.
    """
    final = root / folder_name(step)
    if os.path.lexists(final):
        fix = "a published checkpoint is never written again: remove it, or save to another folder"
        raise CheckpointError(Problem("already-saved", f"step {step} exists already", str(final), fix=fix))
    path = root / (name or f".{folder_name(step)}.writing-{uuid.uuid4().hex[:12]}")
    with disk.reporting_errors(path):
        disk.make_folder(path)
    return path


def publish(root: Path, writing: Path, step: int, manifest: bytes) -> Path:
    """Write the manifest, rename the folder, then write `latest`. Each is on the disk before the next begins.

    Raises: CheckpointError `write-failed`, `already-saved`. The checkpoint is then not published, or the message says
        that it is published and complete.
    """
    prepare(writing, manifest)
    final = commit(root, writing, step)
    announce(root, step)
    return final


def prepare(writing: Path, manifest: bytes) -> None:
    """Write the manifest: the folder is then complete, and not yet published. Raises: CheckpointError
    `write-failed`."""
    with disk.reporting_errors(writing, len(manifest)):
        disk.write_file(writing / NAME, manifest)
        disk.flush_folder(writing)


def commit(root: Path, writing: Path, step: int) -> Path:
    """Publish a complete folder by renaming it. Raises: CheckpointError `write-failed`, `already-saved`."""
    final = root / folder_name(step)
    with disk.reporting_errors(writing):
        if os.path.lexists(final):
            raise CheckpointError(
                Problem("already-saved", f"step {step} was saved by another run in the meantime", str(final))
            )
        disk.rename(writing, final)
    return final


def announce(root: Path, step: int) -> None:
    """Flush the rename of `commit`, and write `latest`. Raises: CheckpointError `write-failed`, which says what is
    published."""
    final = root / folder_name(step)
    with disk.reporting_errors(
        final, len(final.name) + 1, f"step {step} is published and complete, but a later write failed"
    ):
        disk.flush_folder(root)
        newest = list(published(root).values())[-1]  # an older step may be saved after a newer one
        disk.replace_file(root / LATEST, (newest.name + "\n").encode())


def retract(root: Path, writing: Path, step: int) -> None:
    """Take back the rename of `commit`. Raises: CheckpointError `write-failed`."""
    final = root / folder_name(step)
    with disk.reporting_errors(final, what=f"step {step} is published on some nodes only, and cannot be taken back"):
        disk.rename(final, writing)
        disk.flush_folder(root)


def abandon(writing: Path | None) -> None:
    """Remove the folder of a failed save."""
    if writing is not None:
        disk.remove_folder(writing)


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a partly removed one is never taken for a checkpoint."""
    removing = path.with_name(f".{path.name}.removing-{uuid.uuid4().hex[:12]}")
    disk.rename(path, removing)
    disk.flush_folder(path.parent)
    disk.remove_folder(removing)


def set_aside(root: Path, step: int) -> None:
    """Rename the checkpoints after `step`, and write `step` to `latest`. Raises: CheckpointError `write-failed`."""
    with disk.reporting_errors(root):
        for newer, path in published(root).items():
            if newer > step:
                disk.rename(path, path.with_name(f".{path.name}.aside-{uuid.uuid4().hex[:12]}"))
        disk.flush_folder(root)
        disk.replace_file(root / LATEST, (folder_name(step) + "\n").encode())


def surplus(steps: list[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """The steps that retention removes.

    Args:
        steps: all published steps.
        keep_last: how many of the newest to keep, at least one. None: keep all.
        keep_every: also keep the multiples of this number.
    """
    if keep_last is None:
        return []
    newest = set(sorted(steps)[-max(1, keep_last) :])
    return [step for step in sorted(steps) if step not in newest and not (keep_every and step % keep_every == 0)]


def make_root(root: Path) -> None:
    """Create the folder of a run, and flush the folders above it. Raises: CheckpointError `not-a-folder`; OSError."""
    if (
        file := next((path for path in (root, *root.parents) if path.exists() and not path.is_dir()), None)
    ) is not None:
        what = f"{file} is a file, and checkpoints need a folder"
        raise CheckpointError(Problem("not-a-folder", what, str(root), fix="save to another folder"))
    created = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)
    try:
        for path in created:  # a checkpoint is on the disk only if the folders above it are
            disk.flush_folder(path.parent)
    except OSError:
        with suppress(OSError):  # or the next run would find them, and not flush them
            for path in created:
                path.rmdir()
        raise


class Lock:
    """An exclusive lock on a folder of checkpoints. The operating system releases it when the process ends."""

    def __init__(self, root: Path):
        """Raises: CheckpointError `folder-in-use`, `not-a-folder`, `write-failed`."""
        with disk.reporting_errors(root):
            make_root(root)
            self._file = os.open(root / ".lock", os.O_CREAT | os.O_RDWR | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            disk.close(self._file)
            what = "another run writes checkpoints to this folder"
            fix = "give each run a folder of its own, or wait until the other has ended"
            raise CheckpointError(Problem("folder-in-use", what, str(root), fix=fix)) from None
        except OSError:  # the file system does not support locks
            return

    def release(self) -> None:
        if self._file >= 0:
            with suppress(ImportError, OSError):  # forked processes (data loader workers) may still have the file open
                import fcntl

                fcntl.flock(self._file, fcntl.LOCK_UN)
            disk.close(self._file)
            self._file = -1


# -- saving nodes ----------------------------------------------------------------------------------------------------
# Checkpoints of nodes that share no folder: which node wrote which files, and how missing files are reported. Every
# node has the manifest, which is the same on all of them, and the files of its own ranks. So the folders of all
# nodes, copied into one, are an ordinary checkpoint. `about["nodes"]` of the manifest lists [host, ranks] of each
# node. Does not import torch.


KEY = "nodes"
"""The key in `about` of a manifest."""
_MAX_NODES = 8


@dataclass(frozen=True)
class SavingNode:
    """A node that has saved a part of a checkpoint. `number`: counted from 0."""

    number: int
    host: str
    ranks: tuple[int, ...]

    @property
    def files(self) -> set[str]:
        """The names of the files that its ranks may have written."""
        return set(map(rank_file, self.ranks))

    def __str__(self) -> str:
        return f"node {self.number}, host {self.host}, {named_ranks(self.ranks)}"


def saving_nodes(about: dict[str, Any]) -> list[SavingNode]:
    """The nodes that a manifest lists; none if the ranks shared a folder. What is not a list of nodes is ignored."""
    listed, nodes = about.get(KEY), []
    for number, row in enumerate(listed if isinstance(listed, list) else ()):
        if isinstance(row, list) and len(row) == 2 and isinstance(row[1], list):
            ranks = tuple(rank for rank in row[1] if type(rank) is int and rank >= 0)
            nodes.append(SavingNode(number, str(row[0])[:80], ranks))
    return nodes


def check_files(manifest: Manifest, present: Collection[str], where: str, fix: str) -> None:
    """Check that no file of a checkpoint is missing.

    Args:
        present: names of the files that there are.
        where: folder, or folders, that were searched.
        fix: what the user can do.

    Raises: CheckpointError `missing-node-files`: one problem for each node, with its host, files and tensors.
    """
    problems = list(missing_files(manifest, present, where, fix))
    if problems:
        raise CheckpointError(*problems[:_MAX_NODES])


def missing_files(manifest: Manifest, present: Collection[str], where: str, fix: str) -> Iterator[Problem]:
    """One problem for each node with missing files, and one for missing files of no node."""
    missing = [name for name in manifest.files if name not in present]
    for node in saving_nodes(manifest.about):
        files = [name for name in missing if name in node.files]
        missing = [name for name in missing if name not in node.files]
        if files:
            yield _missing(manifest, files, str(node), where, fix)
    if missing:
        yield _missing(manifest, missing, "", where, fix)


def _missing(manifest: Manifest, files: list[str], node: str, where: str, fix: str) -> Problem:
    absent = set(files)
    tensors = [name for name, saved in manifest.tensors.items() if not absent.isdisjoint(files_of(saved.slices))]
    rows = [("node", node)] if node else []
    rows += [("files", short_list(files, 6)), ("tensors", f"{len(tensors)}: {short_list(tensors, 4)}")]
    what = f"{len(files)} of the {len(manifest.files)} files of step {manifest.step} are missing"
    return Problem("missing-node-files", what, where, tuple(rows), fix)
