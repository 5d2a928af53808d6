"""Reading files of other nodes: each rank asks ranks that see the files, which read, compare and send the boxes.

Every rank sends and receives at the same time. In round d, rank r sends to rank r + d and receives from rank r - d, one chunk after
another, so no ranks wait for each other in a circle. Both sides divide the same list of boxes into the same chunks, and each keeps one
chunk in memory. A rank whose disk fails goes on with the rounds, and reports the error at their end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from parallelize.base.errors import CheckpointError, ParallelizeError, Problem
from parallelize.base.files.boxes import Box, relative_to, shape_of, slices_of, starts, volume
from parallelize.checkpoint.format.dtypes import SIZES
from parallelize.checkpoint.format.host_memory import Scratch, torch_dtype
from parallelize.checkpoint.run.fill_tensors import Files, ReadJob
from parallelize.checkpoint.run.rank_sync import RankSync, as_parallelize_error

T = torch.Tensor
CHUNK_BYTES = 8 << 20
_ALIGNED = 16  # bytes: a multiple of the size of every dtype


@dataclass(frozen=True)
class Read:
    """A box of an entry of a file that one rank reads for another. `dtype`: that of the entry, as in the manifest."""

    file: str
    key: str
    box: Box
    dtype: str


@dataclass(frozen=True)
class Piece:
    """A part of a read inside a chunk. `number`: of the read; `box`: in the entry; `start`: its first byte in the chunk."""

    number: int
    box: Box
    start: int


class Transfer:
    """What this rank reads for others, and what others read for it. All ranks make one together.

    Args:
        files: the checkpoint; `files.absent` are the files that other ranks must read.
        jobs: what this rank reads. Those of files that it sees are left out.
        server_of: file -> index of the rank that reads it for others.
        sync: the ranks.
    """

    def __init__(self, files: Files, jobs: Sequence[ReadJob], server_of: Mapping[str, int], sync: RankSync):
        self.files, self.sync = files, sync
        self._jobs: dict[int, list[ReadJob]] = {}
        for job in sorted(jobs, key=lambda job: (job.file, job.key, job.box)):
            if job.file in files.absent and volume(job.box):
                self._jobs.setdefault(server_of[job.file], []).append(job)
        dtype_of = {
            (part.file, part.key): saved.dtype for saved in files.manifest.tensors.values() for part in saved.slices
        }
        self._asked = {
            server: [Read(job.file, job.key, job.box, dtype_of[job.file, job.key]) for job in own]
            for server, own in self._jobs.items()
        }
        messages = {
            server: [[read.file, read.key, read.box, read.dtype] for read in reads]
            for server, reads in self._asked.items()
        }
        self._serves = {
            asker: [Read(file, key, tuple((a, b) for a, b in box), dtype) for file, key, box, dtype in rows]
            for asker, rows in sync.exchange(messages).items()
        }

    def prepare(self, check: bool) -> None:
        """Compare what this rank reads for others with the manifest and, with `check`, with its hashes. A collective.

        Raises: CheckpointError `wrong-entry`, `corrupt-tensor` and those of `TensorFile`, on every rank.
        """
        error: ParallelizeError | None = None
        try:
            for reads in self._serves.values():
                for read in sorted(reads, key=lambda read: read.file):
                    self._check_entry(read)
                    if check:
                        self.files[read.file].check_box(read.key, read.box)
        except Exception as caught:
            error = as_parallelize_error(caught)
        self.sync.agree(error)

    def _check_entry(self, read: Read) -> None:
        entry = self.files[read.file].entry(read.key)
        inside = len(entry.shape) == len(read.box) and all(
            stop <= size for (_, stop), size in zip(read.box, entry.shape, strict=True)
        )
        if entry.dtype != read.dtype or not inside:
            what = f"{read.key} is {entry.dtype} {list(entry.shape)}, the manifest says {read.dtype} and a part {list(read.box)}"
            raise CheckpointError(Problem("wrong-entry", what, str(self.files.folder / read.file)))

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Fill the tensors of the jobs. A collective, after `prepare`.

        Raises: CheckpointError `unreadable-file` and others of `TensorFile`, on every rank: tensors may then be filled in part.
        """
        rank, size = self.sync.rank, self.sync.size
        sending, receiving = Scratch(), Scratch()
        error: ParallelizeError | None = None
        for distance in range(1, size):
            to, source = (rank + distance) % size, (rank - distance) % size
            outgoing = list(chunks_of(self._serves.get(to, ())))
            incoming = list(chunks_of(self._asked.get(source, ())))
            for number in range(max(len(outgoing), len(incoming))):
                out, into = {}, {}
                if number < len(outgoing):
                    pieces, num_bytes = outgoing[number]
                    out[to] = sending.of(num_bytes)
                    if error is None:
                        error = self._read(self._serves[to], pieces, out[to])
                if number < len(incoming):
                    into[source] = receiving.of(incoming[number][1])
                self.sync.swap(out, into)
                if into:
                    self._fill(self._asked[source], self._jobs[source], incoming[number][0], into[source], progress)
        self.sync.agree(error)

    def _read(self, reads: Sequence[Read], pieces: Sequence[Piece], chunk: T) -> ParallelizeError | None:
        """Read the pieces of a chunk. Returns the error: the other side waits for the chunk all the same."""
        try:
            for piece in pieces:
                read = reads[piece.number]
                self.files[read.file].read(read.key, piece.box, _view(chunk, piece, read), check=False)
        except Exception as caught:
            return as_parallelize_error(caught)
        return None

    @staticmethod
    def _fill(
        reads: Sequence[Read],
        jobs: Sequence[ReadJob],
        pieces: Sequence[Piece],
        chunk: T,
        progress: Callable[[int], None] | None,
    ) -> None:
        for piece in pieces:
            job = jobs[piece.number]
            view = job.out[slices_of(relative_to(piece.box, starts(job.box)))]
            view.copy_(_view(chunk, piece, reads[piece.number]))
            if progress is not None:
                progress(view.numel() * view.element_size())


def _view(chunk: T, piece: Piece, read: Read) -> T:
    """The bytes of a piece in a chunk, as a tensor."""
    num_bytes = volume(piece.box) * SIZES[read.dtype]
    return chunk[piece.start : piece.start + num_bytes].view(torch_dtype(read.dtype)).view(shape_of(piece.box))


def chunks_of(reads: Sequence[Read]) -> Iterator[tuple[list[Piece], int]]:
    """(pieces, number of bytes) of the chunks in which the reads are sent; the same on both sides."""
    pieces: list[Piece] = []
    at = 0
    for number, read in enumerate(reads):
        item_bytes = SIZES[read.dtype]
        for box in split_box(read.box, max(1, CHUNK_BYTES // item_bytes)):
            num_bytes = volume(box) * item_bytes
            if pieces and at + num_bytes > CHUNK_BYTES:
                yield pieces, at
                pieces, at = [], 0
            pieces.append(Piece(number, box, at))
            at += -(-num_bytes // _ALIGNED) * _ALIGNED
    if pieces:
        yield pieces, at


def split_box(box: Box, most: int) -> Iterator[Box]:
    """Divide a box into boxes of at most `most` elements, along its first dims."""
    if volume(box) <= most:
        yield box
        return
    dim, (start, stop) = next((dim, side) for dim, side in enumerate(box) if side[1] - side[0] > 1)
    step = max(1, most * (stop - start) // volume(box))
    for at in range(start, stop, step):
        yield from split_box((*box[:dim], (at, min(at + step, stop)), *box[dim + 1 :]), most)
