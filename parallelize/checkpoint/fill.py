"""Filling what a rank holds out of the files of a checkpoint: only the bytes of its own elements, in the order of the files.

What nobody sees yet (a model that lay on meta, new state of an optimiser) is read and compared in one go. What somebody uses
is filled in place, after every hash that it needs was right on every rank: the page cache keeps what was read for that, so the
second reading is cheap, and no second copy of the state is ever held.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint.boxes import Box, box_of, common, moved, slices_of, starts, volume
from parallelize.checkpoint.boxes import whole as whole_box
from parallelize.checkpoint.header import Entry
from parallelize.checkpoint.manifest import Manifest, Piece, Saved
from parallelize.checkpoint.memory import Arena, empty, torch_dtype
from parallelize.checkpoint.reader import Buffers, TensorFile
from parallelize.errors import CheckpointError, Problem
from parallelize.pieces import Stored

T = torch.Tensor
_MOST_OPEN = 128


class Files:
    """The files of one folder, and memory for what is read. Close it, or use `with`.

    Headers are read once; of many files only some are open at a time.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self.arena = Arena()
        self._known: dict[str, TensorFile] = {}
        self._open: OrderedDict[str, None] = OrderedDict()
        self._buffers = Buffers()

    @property
    def bytes_read(self) -> int:
        """Of tensors, by this rank."""
        return sum(file.bytes_read for file in self._known.values())

    def __getitem__(self, name: str) -> TensorFile:
        if name not in self._known:
            self._known[name] = TensorFile(self.folder, name, self.manifest.files[name], self._buffers)
        self._open[name] = None
        self._open.move_to_end(name)
        if len(self._open) > _MOST_OPEN:
            self._known[self._open.popitem(last=False)[0]].close()
        return self._known[name]

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._known.values():
            file.close()


@dataclass(frozen=True)
class Job:
    """One read: a box of an entry of a file, into a part of what a rank holds. `hidden`: nobody uses that yet."""

    file: str
    key: str
    start: int
    box: Box
    out: T
    hidden: bool

    @property
    def num_bytes(self) -> int:
        return volume(self.box) * self.out.element_size()


def jobs_for(files: Files, saved: Saved, stored: Stored, into: T, hidden: bool) -> list[Job]:
    """What to read for a tensor of which this rank holds `stored.pieces`, into `into`, shaped as its local tensor.

    Raises: CheckpointError of `TensorFile`, `wrong-entry` where a file does not hold what the manifest says.
    """
    found = []
    for pair in stored.pieces:
        wanted = box_of(pair.full)
        for piece in saved.pieces:
            shared = common(wanted, piece.box)
            if shared is None:
                continue
            entry = entry_of(files, saved, piece)
            inside = moved(shared, starts(piece.box))
            local = moved(moved(shared, starts(wanted)), [-part.start for part in pair.local])
            found.append(Job(piece.file, piece.key, entry.start, inside, into[slices_of(local)], hidden))
    return found


def entry_of(files: Files, saved: Saved, piece: Piece) -> Entry:
    """The entry of a file that holds a piece. Raises: CheckpointError `missing-tensor`, `wrong-entry`."""
    entry = files[piece.file].entry(piece.key)
    sizes = tuple(stop - start for start, stop in piece.box)
    if (entry.dtype, entry.shape) != (saved.dtype, sizes):
        what = f"{piece.key} is {entry.dtype} {list(entry.shape)}, the manifest says {saved.dtype} {list(sizes)}"
        raise CheckpointError(Problem("wrong-entry", what, str(files.folder / piece.file)))
    return entry


def prepare_jobs(
    files: Files, jobs: Sequence[Job], check: bool = True, progress: Callable[[int], None] | None = None
) -> None:
    """Read what is hidden, and compare the hashes of all the rest. Nothing that anybody uses is changed."""
    for job in sorted(jobs, key=lambda job: (job.file, job.start, job.box)):
        if job.hidden:
            files[job.file].read(job.key, job.box, job.out, check)
        elif check:
            files[job.file].check_box(job.key, job.box)
        if progress is not None:
            progress(job.num_bytes)


def fill_jobs(files: Files, jobs: Sequence[Job]) -> None:
    """Read what is in use, after `prepare_jobs` has ended well on every rank."""
    for job in sorted(jobs, key=lambda job: (job.file, job.start, job.box)):
        if not job.hidden:
            files[job.file].read(job.key, job.box, job.out, check=False)


def room_for(stored: Stored, dtype: torch.dtype, arena: Arena) -> T:
    """Memory for a local tensor, of zeros where pieces leave a part of it out (padding)."""
    if stored.local.is_contiguous():
        made = arena.take(tuple(stored.local.shape), dtype)
    else:  # fused optimisers take a moment to lie as its parameter does
        made = torch.empty_like(stored.local, dtype=dtype)
    clear_padding(stored, made)
    return made


def clear_padding(stored: Stored, room: T) -> None:
    """Zeros where no piece lies."""
    if sum(volume(box_of(pair.local)) for pair in stored.pieces) < room.numel():
        room.zero_()


def read_whole(files: Files, name: str, check: bool = True) -> T:
    """A tensor of the checkpoint in full. Raises: CheckpointError `missing-tensor`, `wrong-entry`."""
    saved = files.manifest.tensors.get(name)
    if saved is None:
        raise CheckpointError(Problem("missing-tensor", f"no tensor {name!r} was saved", str(files.folder)))
    for piece in saved.pieces:
        entry_of(files, saved, piece)  # before memory is taken on the manifest's word
    full = empty(saved.shape, torch_dtype(saved.dtype))
    read_box(files, saved, whole_box(saved.shape), full, check)
    return full


def read_box(files: Files, saved: Saved, box: Box, out: T, check: bool = True) -> None:
    """A box of a tensor into `out`, out of however many pieces it was saved in."""
    for piece in saved.pieces:
        shared = common(box, piece.box)
        if shared is not None:
            entry_of(files, saved, piece)
            view: Any = out[slices_of(moved(shared, starts(box)))]
            files[piece.file].read(piece.key, moved(shared, starts(piece.box)), view, check)
