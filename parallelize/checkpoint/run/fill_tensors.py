"""Filling local tensors from the files of a checkpoint: each rank reads only its own elements, in the order of the
files.

Tensors that are not in use yet (a model from the meta device, new optimizer state) are read and compared in one pass.
Tensors that are in use are filled in place, after all hashes were correct on every rank: the page cache still contains
the bytes, so the second read is fast, and there is never a second copy of the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallelize.base.boxes import (
    Box,
    full_box,
    intersection,
    relative_to,
    shape_of,
    slices_of,
    starts,
    volume,
)
from parallelize.base.errors import CheckpointError, Problem
from parallelize.checkpoint.format.device_pieces import Arena, empty, torch_dtype
from parallelize.checkpoint.format.header import TensorEntry
from parallelize.checkpoint.format.manifest import Manifest, SavedTensor
from parallelize.checkpoint.format.reader import Buffers, TensorFile
from parallelize.checkpoint.format.saved_slices import SavedSlice, overlapping_slices
from parallelize.state.stored_slices import StoredTensor, clear_padding

T = torch.Tensor
_MAX_OPEN_FILES = 128


class Files:
    """The files of one checkpoint, and memory for what is read. Call `close`, or use `with`.

    Headers are read once. Of many files only some are open at a time.

    Attributes:
        received: full tensors that other ranks have sent, by name: `read_full` returns them.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        folder_of: Mapping[str, Path] | None = None,
        absent: Collection[str] = (),
    ):
        """
        Args:
            folder: where the files are, and the folder that errors name.
            folder_of: the folders of files that are not in `folder`.
            absent: files that this rank does not see, whose contents other ranks send to it.
        """
        self.folder, self.manifest = folder, manifest
        self.absent, self.received = frozenset(absent), dict[str, T]()
        self._folder_of = folder_of or {}
        self.arena = Arena()
        self._files: dict[str, TensorFile] = {}
        self._open: OrderedDict[str, None] = OrderedDict()
        self._buffers = Buffers()

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that this rank has read."""
        return sum(file.bytes_read for file in self._files.values())

    def __getitem__(self, name: str) -> TensorFile:
        if name not in self._files:
            folder = self._folder_of.get(name, self.folder)
            self._files[name] = TensorFile(folder, name, self.manifest.files[name], self._buffers)
        self._open[name] = None
        self._open.move_to_end(name)
        if len(self._open) > _MAX_OPEN_FILES:
            self._files[self._open.popitem(last=False)[0]].close()
        return self._files[name]

    def finish(self) -> None:
        """Complete reads that were not waited for. Raises: CheckpointError of `TensorFile.read`."""
        self._buffers.finish()

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class ReadJob:
    """One read: a box of an entry of a file, into a view of a local tensor. `hidden`: that tensor is not in use yet."""

    file: str
    key: str
    start: int
    box: Box
    out: T
    hidden: bool

    @property
    def num_bytes(self) -> int:
        return volume(self.box) * self.out.element_size()


def jobs_for(files: Files, saved: SavedTensor, stored: StoredTensor, into: T, hidden: bool) -> list[ReadJob]:
    """What to read for the elements that `stored` describes, into `into`, which has the shape of its local tensor.

    Raises: CheckpointError of `TensorFile`; `wrong-entry` where a file does not contain what the manifest says.
    """
    jobs = []
    for pair in stored.slices:
        for saved_slice in overlapping_slices(saved.slices, pair.box):
            part = pair.within(saved_slice.box)
            if part is None:
                continue
            entry = entry_of(files, saved, saved_slice)
            in_file = relative_to(part.box, starts(saved_slice.box))
            jobs.append(ReadJob(saved_slice.file, saved_slice.key, entry.start, in_file, into[part.local], hidden))
    return jobs


def entry_of(files: Files, saved: SavedTensor, saved_slice: SavedSlice) -> TensorEntry:
    """The entry of a file that contains a slice. Raises: CheckpointError `missing-tensor`, `wrong-entry`."""
    sizes = shape_of(saved_slice.box)
    if saved_slice.file in files.absent:  # the rank that sends it compares the entry
        return TensorEntry(saved_slice.key, saved.dtype, sizes, 0)
    entry = files[saved_slice.file].entry(saved_slice.key)
    if (entry.dtype, entry.shape) != (saved.dtype, sizes):
        what = f"{saved_slice.key} is {entry.dtype} {list(entry.shape)}, the manifest says {saved.dtype} {list(sizes)}"
        raise CheckpointError(Problem("wrong-entry", what, str(files.folder / saved_slice.file)))
    return entry


def prepare_jobs(
    files: Files, jobs: Sequence[ReadJob], check: bool = True, progress: Callable[[int], None] | None = None
) -> None:
    """Read tensors that are not in use yet, and compare the hashes of the others. No tensor in use is changed."""
    for job in _jobs_in_file_order(files, jobs):
        if job.hidden:
            files[job.file].read(job.key, job.box, job.out, check, wait=False)
        elif check:
            files[job.file].check_box(job.key, job.box)
        if progress is not None:
            progress(job.num_bytes)
    files.finish()


def fill_jobs(files: Files, jobs: Sequence[ReadJob]) -> None:
    """Read tensors that are in use, after `prepare_jobs` has succeeded on every rank."""
    for job in _jobs_in_file_order(files, jobs):
        if not job.hidden:
            files[job.file].read(job.key, job.box, job.out, check=False, wait=False)
    files.finish()


def _jobs_in_file_order(files: Files, jobs: Sequence[ReadJob]) -> list[ReadJob]:
    """The jobs of files that this rank sees, in the order of the files."""
    visible = [job for job in jobs if job.file not in files.absent]
    return sorted(visible, key=lambda job: (job.file, job.start, job.box))


def allocate_local(stored: StoredTensor, dtype: torch.dtype, arena: Arena) -> T:
    """Memory for a local tensor, with zeros in its padding."""
    if stored.local.is_contiguous():
        room = arena.take(tuple(stored.local.shape), dtype)
    else:  # fused optimizers assume that a moment has the strides of its parameter
        room = torch.empty_like(stored.local, dtype=dtype)
    clear_padding(stored, room)
    return room


def read_full(files: Files, name: str, check: bool = True) -> T:
    """A full tensor of the checkpoint. Raises: CheckpointError `missing-tensor`, `wrong-entry`."""
    if name in files.received:
        return files.received[name]
    saved = files.manifest.tensors.get(name)
    if saved is None:
        raise CheckpointError(Problem("missing-tensor", f"no tensor {name!r} was saved", str(files.folder)))
    for saved_slice in saved.slices:
        entry_of(files, saved, saved_slice)  # before memory is allocated as the manifest says
    full = empty(saved.shape, torch_dtype(saved.dtype))
    read_box(files, saved, full_box(saved.shape), full, check)
    return full


def read_box(files: Files, saved: SavedTensor, box: Box, out: T, check: bool = True) -> None:
    """Read a box of a tensor into `out`, from the slices in which it was saved."""
    for saved_slice in overlapping_slices(saved.slices, box):
        shared = intersection(box, saved_slice.box)
        if shared is not None:
            entry_of(files, saved, saved_slice)
            view: Any = out[slices_of(relative_to(shared, starts(box)))]
            files[saved_slice.file].read(saved_slice.key, relative_to(shared, starts(saved_slice.box)), view, check)
