"""Every tensor of a checkpoint compared with its hashes, and every file with the manifest or the index. Does not import
torch.

Two layouts are known: see `contents`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from parallelize.base.boxes import shape_of
from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.digests import BLOCK_BYTES, digest_of, read_digests
from parallelize.checkpoint.format.gather import Source, gathered, sources_of, step_folders
from parallelize.checkpoint.format.header import FileInfo, Header, TensorEntry, read_header
from parallelize.checkpoint.format.manifest import NAME, Manifest, SavedTensor
from parallelize.checkpoint.format.saved_slices import SavedSlice
from parallelize.checkpoint.hub.file_shards import INDEX
from parallelize.checkpoint.tools.contents import is_hub_folder, opened, weight_files

SlicesByKey = dict[str, tuple[SavedTensor, SavedSlice]]
"""Key in a file -> the tensor and the slice of it that has this key."""
_FIX = "restore the file from a copy, or load another step"


@dataclass
class CheckReport:
    """The result of a check.

    Attributes:
        folder: that was checked.
        files, tensors: number of files and of their entries.
        hashed: bytes of tensors that were compared with a hash.
        unhashed: names of files without hashes.
        problems: that were found.
    """

    folder: Path
    files: int = 0
    tensors: int = 0
    hashed: int = 0
    unhashed: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def verify_checkpoint(
    path: Source, step: int | None = None, progress: Callable[[int], None] | None = None
) -> list[Problem]:
    """Compare every tensor with its hashes, and every file with the manifest or the index.

    Continues after a problem. For files without hashes (Hugging Face folders), only the structure is checked;
    `check_folder` returns their names.

    Args:
        path: folder of one step, of a run, or in Hugging Face's layout; or several, the folders of nodes that share
            none.
        step: which step of a run. Default: the newest.
        progress: called with the number of bytes after each read.

    Returns: one problem per damaged tensor or file.
    Raises: CheckpointError `no-checkpoint`.
    """
    return check_folder(path, step, progress).problems


def check_folder(path: Source, step: int | None = None, progress: Callable[[int], None] | None = None) -> CheckReport:
    """As `verify_checkpoint`, with counts of what was checked."""
    first, *others = sources_of(path)
    if step is None and not others and is_hub_folder(first):
        return _Check([first], progress).hub()
    return _Check(step_folders(path, step), progress).run()


class _Check:
    """One check. Problems are collected; parts that depend on a damaged part are skipped."""

    def __init__(self, folders: Sequence[Path], progress: Callable[[int], None] | None):
        self.folders, self.folder, self.progress = folders, folders[0], progress
        self.report = CheckReport(self.folder)
        self._buffer = memoryview(bytearray(BLOCK_BYTES))

    def run(self) -> CheckReport:
        """A training checkpoint. Every copy of a file is checked."""
        with self._collect_problems():
            checkpoint = gathered(self.folders)
            manifest = checkpoint.manifest
            slices: dict[str, SlicesByKey] = {name: {} for name in manifest.files}
            for saved in manifest.tensors.values():
                for part in saved.slices:
                    slices[part.file][part.key] = (saved, part)
            with self._collect_problems():
                checkpoint.check_files()
            for info in manifest.files.values():
                for folder in checkpoint.copies(info.name) or ([] if checkpoint.is_of_nodes else [self.folder]):
                    with self._collect_problems():
                        self._check_file(folder, info, slices[info.name])
            for folder in checkpoint.folders:
                self._check_unlisted(folder, manifest)
        return self.report

    def hub(self) -> CheckReport:
        """A Hugging Face folder."""
        with self._collect_problems():
            names, listed = weight_files(self.folder)
            file_of: dict[str, str] = {}
            for name in names:
                with self._collect_problems(), opened(self.folder, name) as (descriptor, size):
                    header = read_header(descriptor, size, str(self.folder / name))
                    self._check_unique(header, name, file_of)
                    self._check_blocks(descriptor, str(self.folder / name), name, header)
            if listed is not None:
                self._check_index(listed, file_of)
        return self.report

    def _add(self, slug: str, what: str, where: str, rows: tuple[tuple[str, str], ...] = (), fix: str = _FIX) -> None:
        self.report.problems.append(Problem(slug, what, where, rows, fix))

    @contextmanager
    def _collect_problems(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self.report.problems += error.problems

    def _check_unlisted(self, folder: Path, manifest: Manifest) -> None:
        for path in sorted(folder.iterdir()):
            if path.name not in manifest.files and path.name != NAME:
                self._add("unlisted-file", "is not in the manifest, and is never read", str(path), fix="remove it")

    # -- a file ---------------------------------------------------------------------------------------------------

    def _check_file(self, folder: Path, info: FileInfo, slices: SlicesByKey) -> None:
        where = str(folder / info.name)
        with opened(folder, info.name) as (descriptor, size):
            if size != info.num_bytes:
                rows = (("expected", f"{info.num_bytes:,} bytes"), ("found", f"{size:,} bytes"))
                self._add("wrong-size", "has another size than it was written with", where, rows)
                return
            header = read_header(descriptor, size, where)
            digest = digest_of(header.raw)
            if digest != info.header:
                rows = (("expected", info.header), ("found", digest))
                self._add("corrupt-header", "its header does not match its digest", where, rows)
            self._check_entries(header, where, slices)
            self._check_blocks(descriptor, where, info.name, header)

    def _check_entries(self, header: Header, where: str, slices: SlicesByKey) -> None:
        """The entries of a file must be exactly the slices that the manifest lists for it."""
        for key, (saved, part) in slices.items():
            expected = f"{saved.dtype} {list(shape_of(part.box))}"
            entry = header.entries.get(key)
            if entry is None:
                rows = (("tensor", saved.name), ("expected", expected), ("found", "no entry of that name"))
                self._add("missing-tensor", f"lacks {key!r}, which the manifest lists for it", where, rows)
            elif (entry.dtype, entry.shape) != (saved.dtype, shape_of(part.box)):
                rows = (("tensor", saved.name), ("expected", expected), ("found", f"{entry.dtype} {list(entry.shape)}"))
                self._add("wrong-entry", f"{key} differs from the manifest", where, rows)
        for key in header.entries:
            if key not in slices:
                self._add("unlisted-tensor", f"contains {key!r}, which the manifest does not list", where)

    def _check_blocks(self, descriptor: int, where: str, name: str, header: Header) -> None:
        """Read every tensor and compare its hashes. Tensors of a file without hashes are not read."""
        self.report.files += 1
        self.report.tensors += len(header.entries)
        sizes = {entry.name: entry.num_bytes for entry in header.entries.values()}
        digests = read_digests(header.metadata, sizes, where)
        if digests is None:
            self.report.unhashed.append(name)
            return
        for entry in header.entries.values():
            expected = digests[entry.name]
            damaged = [block for block in self._digests(descriptor, entry, where) if block[2] != expected[block[0]]]
            if damaged:
                number, length, digest = damaged[0]
                first = number * BLOCK_BYTES
                rows = (
                    ("tensor", entry.name),
                    ("bytes", f"{first:,} to {first + length:,} of {entry.num_bytes:,}"),
                    ("expected", expected[number]),
                    ("found", digest),
                )
                more = (("blocks", f"{len(damaged)} of {len(expected)} are damaged"),)
                self._add("corrupt-tensor", f"{entry.name} does not match its digest", where, (*rows, *more))

    def _digests(self, descriptor: int, entry: TensorEntry, where: str) -> Iterator[tuple[int, int, str]]:
        """(number, number of bytes, digest) of each block of a tensor, computed from the file."""
        for number, at in enumerate(range(0, entry.num_bytes, BLOCK_BYTES)):
            data = self._buffer[: min(BLOCK_BYTES, entry.num_bytes - at)]
            _read(descriptor, data, entry.start + at, where)
            self.report.hashed += len(data)
            if self.progress is not None:
                self.progress(len(data))
            yield number, len(data), digest_of(data)

    # -- an index -------------------------------------------------------------------------------------------------

    def _check_unique(self, header: Header, name: str, file_of: dict[str, str]) -> None:
        """Each tensor must be in one file. Adds the tensors of this file to `file_of`."""
        for tensor in header.entries:
            if tensor in file_of:
                what = f"{tensor} is in {file_of[tensor]} and in {name}"
                self._add("bad-index", what, str(self.folder), fix="keep one of the files")
            file_of[tensor] = name

    def _check_index(self, listed: dict[str, str], file_of: dict[str, str]) -> None:
        """The index must list exactly the tensors of the files."""
        where, fix = str(self.folder / INDEX), "the files do not belong together: copy or download them again"
        for tensor in [*listed, *(name for name in file_of if name not in listed)]:
            if listed.get(tensor) != file_of.get(tensor):
                rows = (
                    ("tensor", tensor),
                    ("expected", f"in {listed.get(tensor) or 'no file'}"),
                    ("found", f"in {file_of.get(tensor) or 'no file'}"),
                )
                self._add("bad-index", f"{tensor} is not in the file that the index names", where, rows, fix)


def _read(descriptor: int, data: memoryview, start: int, where: str) -> None:
    at = 0
    while at < len(data):
        try:
            count = os.preadv(descriptor, [data[at:]], start + at)
        except OSError as error:
            what = f"byte {start + at} cannot be read: {error.strerror}"
            raise CheckpointError(Problem("unreadable-file", what, where)) from error
        if count == 0:
            raise CheckpointError(Problem("truncated-file", f"ends at byte {start + at}, inside a tensor", where))
        at += count
