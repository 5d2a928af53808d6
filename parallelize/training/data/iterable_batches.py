"""Global batches of data that can only be iterated, which do not depend on the mesh.

    batches = IterableBatches([partial(open_shard, name) for name in names], 256, mesh=mesh)
    for batch in batches.loader(num_workers=4):
        ...
        checkpoint = batches.state_dict()

With n sources, a global batch of B samples has the next B / n samples of each source, in the order of the sources. Data
rank i of r takes the i-th of r parts of the batch, so it reads only the sources that its part comes from. Workers
divide these sources, and the training process joins what they have read. A run that is resumed on another mesh, or with
another number of workers, sees the same global batches in the same order.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from parallelize.base.errors import CheckpointError, DataError, Problem, ShapeError
from parallelize.base.torch_private.torch_tensors import hidden_worker_info
from parallelize.comm.mesh_view import MeshView
from parallelize.ops.random.counter import key
from parallelize.training.data.sample_reader import SampleReader, Source, check_source, not_a_position


class IterableBatches:
    """This rank's samples of each global batch. Iterating gives lists of samples; `loader` gives collated batches.

    The position counts the batches that the loop has taken, also where workers read ahead. If an iteration is stopped
    early, the next one continues at the position.

    Args:
        sources: one iterable, or a list of n of them. Each can be iterated again and again; or it is a function of the
            epoch that returns the samples of that epoch, shuffled with the epoch as seed, say. All ranks pass equal
            sources. One with `state_dict` and `load_state_dict` continues from its own state, and is copied
            (`copy.deepcopy`) for each epoch.
        global_batch_size: samples per step, over all data ranks: a multiple of n and of the number of data ranks.
        mesh: a DeviceMesh with any axes, or None for one data rank.
        repeat: whether a source begins again when it ends, so that there is no end. Default: for several sources. One
            source without it is an epoch, which ends with the last full batch.

    Raises: ShapeError `indivisible-batch`; DataError `bad-source` for an iterator (a generator, an open file), which
        cannot be read again, and for a string or a dict, which is one sample; DataError `unequal-ends` for several
        sources without `repeat`, as a rank cannot know when a source ends that other ranks read; DataError
        `no-samples`, while iterating, for a source without samples.
    Cost: no communication. One source is read by every data rank, which drops the samples of the others.
    """

    def __init__(
        self,
        sources: Source | Sequence[Source],
        global_batch_size: int,
        *,
        mesh: Any = None,
        repeat: bool | None = None,
    ):
        listed = list(sources) if isinstance(sources, list | tuple) else [sources]
        self.global_batch_size, self.num_sources = global_batch_size, len(listed)
        self.repeat = len(listed) > 1 if repeat is None else repeat
        self.data_index, self.data_ranks = (0, 1) if mesh is None else MeshView.of(mesh).sample_place
        for index, source in enumerate(listed):
            check_source(source, f"source {index}")
        self._check()
        self._parts = list(self._parts_of_rank(listed))

    def _check(self) -> None:
        for count, name in ((self.num_sources, "sources"), (self.data_ranks, "data ranks")):
            if not count or self.global_batch_size < 1 or self.global_batch_size % count:
                what = f"a global batch of {self.global_batch_size} samples cannot be split over {count} {name}"
                raise ShapeError(Problem("indivisible-batch", what, fix=f"use a multiple of {max(count, 1)}"))
        if self.num_sources > 1 and not self.repeat:
            what = f"{self.num_sources} sources may end after different numbers of samples"
            fix = "repeat=True, and end training after a number of steps; or chain them into one source"
            raise DataError(Problem("unequal-ends", what, fix=fix))

    def _parts_of_rank(self, sources: list[Source]) -> Iterator[_Part]:
        """The sources that this rank reads."""
        per_source, per_rank = self.global_batch_size // self.num_sources, self.global_batch_size // self.data_ranks
        first, last = self.data_index * per_rank, (self.data_index + 1) * per_rank
        for index, source in enumerate(sources):
            start = index * per_source
            selected = slice(max(first - start, 0), max(min(last - start, per_source), 0))
            if selected.start < selected.stop:
                yield _Part(index, SampleReader(source, self.repeat), per_source, selected)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._taken(_Samples(self._parts), 1)

    def loader(
        self, *, num_workers: int = 0, collate_fn: Callable[[list[Any]], Any] = default_collate, **options: Any
    ) -> IterableLoader:
        """A DataLoader of these batches, collated. Its iterations continue at the position.

        Args:
            num_workers: processes that read and prepare samples, at most one for each source that this rank reads. In a
                worker a source sees no `get_worker_info()`: it is read as a whole, by one worker.
            collate_fn: makes a batch of a list of samples, in the training process; `collate_rows`, for example.
            options: more arguments of DataLoader, such as `prefetch_factor`, `pin_memory`, `multiprocessing_context`.

        Raises: DataError `too-many-workers`.
        """
        if num_workers > len(self._parts):
            what = f"{num_workers} workers cannot divide the {len(self._parts)} sources that this rank reads"
            fix = f"use num_workers={len(self._parts)} or fewer, or split the data into more sources"
            raise DataError(Problem("too-many-workers", what, fix=fix))
        # the order is that of the sources
        named = options.keys() - ({"in_order"} if options.get("in_order", True) else set())
        refused = named & {
            "batch_size",
            "shuffle",
            "sampler",
            "batch_sampler",
            "drop_last",
            "persistent_workers",
            "in_order",
        }
        if refused:
            raise TypeError(f"IterableBatches determines {', '.join(sorted(refused))} itself")
        return IterableLoader(self, num_workers, collate_fn, options)

    def _taken(self, items: Any, workers: int) -> Iterator[list[Any]]:
        """The samples of a batch from every `workers` items; the position moves before each one is returned."""
        stream = iter(items)
        while received := list(islice(stream, workers)):
            chunk = [unpacked(item) if isinstance(item, WorkerMessage) else item for item in received]
            for _, states in chunk:
                self._load(states)
            yield [sample for samples, _ in chunk for sample in samples]
        for part in self._parts:
            part.reader.next_epoch()

    def _load(self, states: Mapping[int, Any]) -> None:
        for part in self._parts:
            if part.index in states:
                part.reader.load_state_dict(states[part.index])

    def state_dict(self) -> dict[str, Any]:
        """The position in each source that this rank reads, after the batches taken so far."""
        return {
            "num_sources": self.num_sources,
            "sources": {part.index: part.reader.state_dict() for part in self._parts},
        }

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The states of all data ranks of a saved run as one, which `load_state_dict` takes on any mesh."""
        merged: dict[str, Any] = {"num_sources": self.num_sources, "sources": {}}
        for state in states:
            self._check_state(state)
            merged["sources"].update(state["sources"])
        return merged

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Iterations that have begun are not changed. The global batch size may be
        another one.

        Args:
            state: what `state_dict` returned on this data rank, or what `merge_states` made of all ranks' states.

        Raises: CheckpointError `data-position` for other sources, or if this rank reads a source that the state does
            not have. Nothing is changed then.
        """
        self._check_state(state)
        absent = [part.index for part in self._parts if part.index not in state["sources"]]
        if absent:
            what = f"this rank reads source {absent[0]}, whose position another data rank has saved"
            raise CheckpointError(
                Problem("data-position", what, fix="pass merge_states([the state of each data rank])")
            )
        for part in self._parts:
            part.reader.check_state(state["sources"][part.index])
        self._load(state["sources"])

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, dict) or not isinstance(state.get("sources"), dict):
            raise not_a_position("the saved position", state)
        if state.get("num_sources") != self.num_sources:
            what = f"the position is one of {state.get('num_sources')} sources, here are {self.num_sources}"
            raise CheckpointError(Problem("data-position", what, fix="pass the same sources in the same order"))


@dataclass
class _Part:
    """What this rank takes from one source: in each step, of the next `count` samples those in `selected`."""

    index: int
    reader: SampleReader
    count: int
    selected: slice


class _Samples(IterableDataset):
    """Of each step the samples of some sources, and the positions after them by source; read from copies of the
    readers.

    In a worker as messages. The sources do not see the worker: each is one worker's alone, and a source that divides
    itself over the workers, as PyTorch's documents show and those of `datasets` do, would lose all but a part of its
    samples.
    """

    def __init__(self, parts: list[_Part]):
        self.parts = parts

    def __iter__(self) -> Iterator[tuple[list[Any], dict[int, Any]] | WorkerMessage]:
        worker = get_worker_info()
        if worker is None:
            yield from self._steps(0, 1)
            return
        steps = self._steps(worker.id, worker.num_workers)
        while True:
            with hidden_worker_info():
                step = next(steps, None)
            if step is None:
                return
            yield packed(step)

    def _steps(self, index: int, count: int) -> Iterator[tuple[list[Any], dict[int, Any]]]:
        """Of the sources that worker `index` of `count` reads."""
        total = len(self.parts)
        parts = self.parts[index * total // count : (index + 1) * total // count]
        readers = [part.reader.copy() for part in parts]
        streams = [iter(reader) for reader in readers]
        while True:
            samples: list[Any] = []
            for part, stream in zip(parts, streams, strict=True):
                following = list(islice(stream, part.count))
                if len(following) < part.count:
                    return
                samples += following[part.selected]
            yield samples, {part.index: reader.state_dict() for part, reader in zip(parts, readers, strict=True)}


class IterableLoader:
    """Collated batches of an `IterableBatches`, read by workers. Made by `IterableBatches.loader`."""

    def __init__(
        self, batches: IterableBatches, workers: int, collate_fn: Callable[[list[Any]], Any], options: dict[str, Any]
    ):
        self.batches, self.workers, self.collate_fn, self.options = batches, workers, collate_fn, options

    def __iter__(self) -> Iterator[Any]:
        samples = _Samples(self.batches._parts)
        options = {"generator": self._generator(), **self.options}
        loader = DataLoader(samples, batch_size=None, num_workers=self.workers, collate_fn=_unchanged, **options)
        for taken in self.batches._taken(loader, max(self.workers, 1)):
            yield self.collate_fn(taken)

    def _generator(self) -> torch.Generator:
        """For the seeds of workers: of this rank and position. DataLoader would draw them from the generator of the
        process, which a resumed run does once more than one that goes on."""
        readers = [part.reader for part in self.batches._parts]
        position = [number for reader in readers for number in (reader.epoch, reader.taken)]
        seed = key(0, "workers", self.batches.data_index, *position).start & (2**63 - 1)
        return torch.Generator().manual_seed(seed)


def _unchanged(item: Any) -> Any:
    return item


# -- worker messages -------------------------------------------------------------------------------------------------
# What a worker sends to the training process: every tensor of it in one buffer. A tensor that is sent by itself takes
# a file descriptor and a shared file, which the receiver keeps open as long as the tensor: a batch of some hundred
# samples exceeds the 1024 that a process may have.


_ALIGNED_TO = 16  # bytes: of the widest dtype, complex128


class WorkerMessage(NamedTuple):
    """A packed value. A named tuple, so that DataLoader's `pin_memory` pins the buffer."""

    pickled: bytes
    buffer: torch.Tensor


def packed(value: Any) -> WorkerMessage:
    """A value of any type as a message: its plain CPU tensors as bytes of one buffer, without the rest of their
    storages."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    buffer = torch.empty(pickler.size, dtype=torch.uint8, device="cpu")
    for (start, stop), data in pickler.placed:
        buffer[start:stop] = data
    return WorkerMessage(file.getvalue(), buffer)


def unpacked(message: WorkerMessage) -> Any:
    """The value, whose tensors are views of the message's buffer."""
    return _Unpickler(io.BytesIO(message.pickled), message.buffer).load()


class _Pickler(ForkingPickler):
    """Replaces tensors by their places in the buffer. What it leaves to torch (subclasses, sparse ones) is sent as
    torch does."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.size = 0
        self.placed: list[tuple[tuple[int, int], torch.Tensor]] = []
        self._seen: dict[int, tuple[Any, ...]] = {}
        self._kept: list[torch.Tensor] = []  # or another tensor may get the id of one that is gone

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) is not torch.Tensor or not _is_plain(value):
            return None
        if id(value) not in self._seen:
            self._kept.append(value)
            self._seen[id(value)] = self._place(value), value.dtype, tuple(value.shape)
        return self._seen[id(value)]

    def _place(self, value: torch.Tensor) -> tuple[int, int]:
        data = value.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        place = self.size, self.size + len(data)
        self.size = -(-place[1] // _ALIGNED_TO) * _ALIGNED_TO
        self.placed.append((place, data))
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffer: torch.Tensor):
        super().__init__(file)
        self.buffer = buffer
        self._made: dict[tuple[int, int], torch.Tensor] = {}

    def persistent_load(self, placed: tuple[Any, ...]) -> torch.Tensor:
        (start, stop), dtype, shape = placed
        if start == stop:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if (start, stop) not in self._made:
            self._made[start, stop] = self.buffer[start:stop].view(dtype).view(shape)
        return self._made[start, stop]


def _is_plain(tensor: torch.Tensor) -> bool:
    on_cpu = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return on_cpu and not tensor.requires_grad and not tensor.is_quantized
