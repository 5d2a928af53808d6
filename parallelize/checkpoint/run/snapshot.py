"""A training state at one moment, as one rank sees it: the tensors that it writes, and what it reports about them.

For a save in the background, everything is copied once, into buffers that the next save reuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallelize.base.boxes import Box, relative_to, shape_of, slices_of, starts, volume
from parallelize.base.errors import CheckpointError, ParallelizeError, Problem
from parallelize.base.layout import replicated
from parallelize.checkpoint.format.device_pieces import Arena, Scratch, code_of, torch_dtype
from parallelize.checkpoint.format.header import SIZES
from parallelize.checkpoint.format.json_codec import TensorSink, encode
from parallelize.checkpoint.format.writer import TensorToWrite
from parallelize.checkpoint.run import optimizer_state, run_state
from parallelize.checkpoint.run.fill_tensors import Files, ReadJob
from parallelize.checkpoint.run.local_tensors import LocalTensor, ModelOnMesh, weights
from parallelize.checkpoint.run.rank_sync import RankSync, as_parallelize_error
from parallelize.checkpoint.run.run_contents import Run
from parallelize.checkpoint.run.run_state import describe_scheduler
from parallelize.state.full_values import reshard_units
from parallelize.state.stored_slices import StoredTensor

T = torch.Tensor
Table = dict[str, list[Any]]
"""Tensor name -> [dtype, full shape, [[key, box]], about]: what a rank reports about the tensors it has written."""


@dataclass
class Snapshot:
    """One rank's part of a save."""

    step: int
    outgoing: list[TensorToWrite]
    table: Table
    state: dict[str, Any]


class Staging:
    """Copies of the tensors that a background save writes: allocated once, and reused while shapes stay the same."""

    def __init__(self) -> None:
        self.buffers: dict[str, T] = {}
        self._arena = Arena()
        self._used: set[str] = set()

    def begin(self) -> None:
        """Start a save."""
        self._used = set()

    def copy(self, key: str, value: T) -> T:
        """A copy on the CPU, which may not be complete before `end`."""
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = self.buffers[key] = self._allocate(value)
        self._used.add(key)
        return buffer.copy_(value.detach(), non_blocking=True)

    def _allocate(self, value: T) -> T:
        if value.device.type == "cuda":
            return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return self._arena.take(tuple(value.shape), value.dtype)

    def end(self) -> None:
        """Wait for copies from an accelerator, and drop buffers that this save has not used."""
        if any(buffer.is_pinned() for buffer in self.buffers.values()):
            torch.accelerator.synchronize()
        self.buffers = {key: buffer for key, buffer in self.buffers.items() if key in self._used}


def take(run: Run, on_mesh: ModelOnMesh, step: int, values: Any = None, staging: Staging | None = None) -> Snapshot:
    """The current state. Without `staging`, tensors are views, which must not change until they are written.

    Raises: CheckpointError `unsavable-state`, `unsavable-value`, `unsavable-dtype`, `foreign-parameter`, `extra-state`.
    """
    _check_extra_state(run.module)
    reshard_units(run.module)
    values_with_tensors = _TensorsInValues()
    tensors = weights(on_mesh)
    descriptions = {}
    for name, optimizer in run.optimizers.items():
        moments, descriptions[name] = optimizer_state.collect(on_mesh, name, optimizer, values_with_tensors)
        tensors += moments
    state = {"optimizers": descriptions} | _state(run, on_mesh, values, values_with_tensors)
    if staging is not None:
        staging.begin()
    outgoing: list[TensorToWrite] = []
    table: Table = {}
    for tensor in [*tensors, *values_with_tensors.tensors]:
        _add(tensor, outgoing, table, staging)
    if staging is not None:
        staging.end()
    return Snapshot(step, outgoing, table, state)


def _state(run: Run, on_mesh: ModelOnMesh, values: Any, sink: TensorSink) -> dict[str, Any]:
    state: dict[str, Any] = {"streams": run_state.collect_streams(on_mesh, run.streams, sink)}
    if run.generators:
        state["generators"] = run_state.collect_generators(on_mesh, sink)
    # every rank asks, because a user's own state_dict may be a collective
    user_states = {name: stateful.state_dict() for name, stateful in run.user.items()}
    state["data"] = run_state.collect_data(on_mesh, run.data, sink)
    if run_state.rank_of(on_mesh) == 0:
        state["position"] = run_state.collect_position(on_mesh, run.pipeline)
        state["schedulers"] = {name: describe_scheduler(scheduler) for name, scheduler in run.schedulers.items()}
        state["scheduled"] = {name: _owner_of(scheduler, run.optimizers) for name, scheduler in run.schedulers.items()}
        state["user"] = {name: encode(user, f"user.{name}", sink) for name, user in user_states.items()}
        state["values"] = encode(values, "values", sink)
    return state


def _owner_of(scheduler: Any, optimizers: Mapping[str, Optimizer]) -> str | None:
    """The name of the optimizer whose learning rates a scheduler sets."""
    inner = getattr(scheduler, "_schedulers", None) or [scheduler]
    owner = getattr(scheduler, "optimizer", None) or getattr(inner[0], "optimizer", None)
    return next((name for name, optimizer in optimizers.items() if optimizer is owner), None)


def _add(tensor: LocalTensor, outgoing: list[TensorToWrite], table: Table, staging: Staging | None) -> None:
    boxes = []
    for owned in tensor.owned():
        value = owned.value if staging is None else staging.copy(owned.key, owned.value)
        outgoing.append(TensorToWrite(owned.key, tensor.dtype, tuple(value.shape), _returning(value)))
        boxes.append([owned.key, [list(side) for side in owned.box]])
    if boxes or (tensor.owner and tensor.replica == 0 and 0 in tensor.stored.shape):  # an empty tensor has no box
        table[tensor.name] = [tensor.dtype, list(tensor.stored.shape), boxes, tensor.about]


def _returning(value: T) -> Callable[[], T]:
    return lambda: value


class _TensorsInValues:
    """A sink for tensors inside plain values: each is saved in full, by the rank that has it."""

    def __init__(self) -> None:
        self.tensors: list[LocalTensor] = []

    def __call__(self, where: str, tensor: T) -> str:
        name = f"state/{where}"
        if any(other.name == name for other in self.tensors):
            name = f"{name}#{len(self.tensors)}"
        if code_of(tensor.dtype) is None:
            what = f"{where} is of {tensor.dtype}, which safetensors files do not have"
            raise CheckpointError(Problem("unsavable-dtype", what, fix="keep it in another dtype"))
        copy = tensor.detach().to("cpu", copy=True)
        self.tensors.append(LocalTensor(name, _stored_in_full(name, copy), single_writer=True))
        return name


def _stored_in_full(name: str, tensor: T) -> StoredTensor:
    shape = tuple(tensor.shape)
    return StoredTensor(name, (name,), tensor, shape, replicated(shape, 1).slices(0))


def _check_extra_state(module: nn.Module) -> None:
    """Refuse modules with state that is not in their tensors."""
    for name, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            what = f"{name or 'the model'} ({type(inner).__name__}) has extra state, which is not a tensor"
            fix = "pass it as user={...}: an object with state_dict and load_state_dict"
            raise CheckpointError(Problem("extra-state", what, fix=fix))


# -- transfer --------------------------------------------------------------------------------------------------------
# Reading files of other nodes: each rank asks ranks that see the files, which read, compare and send the boxes. Every
# rank sends and receives at the same time. In round d, rank r sends to rank r + d and receives from rank r - d, one
# chunk after another, so no ranks wait for each other in a circle. Both sides divide the same list of boxes into the
# same chunks, and each keeps one chunk in memory. A rank whose disk fails goes on with the rounds, and reports the
# error at their end.


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
    """A part of a read inside a chunk. `number`: of the read; `box`: in the entry; `start`: its first byte in the
    chunk."""

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
            what = (
                f"{read.key} is {entry.dtype} {list(entry.shape)}, the manifest says {read.dtype} and a part "
                f"{list(read.box)}"
            )
            raise CheckpointError(Problem("wrong-entry", what, str(self.files.folder / read.file)))

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Fill the tensors of the jobs. A collective, after `prepare`.

        Raises: CheckpointError `unreadable-file` and others of `TensorFile`, on every rank: tensors may then be filled
            in part.
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
