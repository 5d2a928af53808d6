"""Pretrained weights into a planned model: each rank reads the bytes of its own shards, and no others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.checkpoint.boxes import Box, Part, box_of, common, moved, shape_of, slices_of, starts, volume
from parallelize.checkpoint.boxes import whole as whole_box
from parallelize.checkpoint.fill import room_for
from parallelize.checkpoint.fresh import Fresh
from parallelize.checkpoint.held import Held, Place, placed, targets
from parallelize.checkpoint.hub_folder import HubFolder
from parallelize.checkpoint.hub_names import Computed, Sources, Wanted, parts_in
from parallelize.checkpoint.meeting import TIMEOUT_S, Meeting, known
from parallelize.checkpoint.memory import Arena, torch_dtype
from parallelize.checkpoint.snapshot import fold
from parallelize.errors import CheckpointError, Problem, short_list
from parallelize.pieces import named_once
from parallelize.progress_line import Progress

T = torch.Tensor
Rebuild = Mapping[str, Callable[[], T]]


@dataclass(frozen=True)
class Loaded:
    """What `load_pretrained` did. `bytes_read`: of tensors, by this rank; `bytes_held`: of what it filled."""

    bytes_read: int
    bytes_held: int


def load_pretrained(
    model: Any,
    folder: str | os.PathLike,
    *,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    allow_pickle: bool = False,
    rebuild: Rebuild | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Loaded:
    """Fill a model from a checkpoint in Hugging Face's layout. A collective over all processes.

    Each rank reads its own shards. A model on meta is allocated first, and filled in place; one with values is changed only
    after everything was read. Floating dtypes are converted to the model's.

    Args:
        model: a module, whole, planned, cut into stages or under ZeRO; or a `ParallelModel`.
        folder: with `model.safetensors` or its index; or one .safetensors file.
        device: where a model on meta is allocated. Default: the mesh's device type, or the CPU.
        mesh: of all processes, where the model does not know it.
        allow_missing: tensors that the folder lacks keep their values; not for a model on meta. allow_unexpected: tensors
            that the model lacks are passed over.
        allow_pickle: see `HubFolder`.
        rebuild: as `materialize` takes it.

    Raises: CheckpointError, on every rank: `missing-tensor` and `unexpected-tensor` with near names, `wrong-shape`,
        `wrong-dtype`, `twins-differ`, those of the files; the model is then as it was.
    """
    module, place = placed(model, mesh)
    meeting = Meeting(place.mesh, timeout_s, beside=False)
    try:
        return _Load(module, place, meeting, device, rebuild).run(folder, allow_missing, allow_unexpected, allow_pickle)
    finally:
        meeting.close()


class _Load:
    """One load. The order is the text of `run`."""

    def __init__(self, module: nn.Module, place: Place, meeting: Meeting, device: Any, rebuild: Rebuild | None):
        self.module, self.place, self.meeting, self.rebuild = module, place, meeting, rebuild
        self.device = device or (place.mesh.device_type if place.mesh is not None else "cpu")
        self.fresh = Fresh(module)
        self.arena = Arena()

    def run(self, folder: Any, allow_missing: bool, allow_unexpected: bool, allow_pickle: bool) -> Loaded:
        fold(self.module)
        wanted = wanted_of(self.place, self.meeting)
        found, error = None, None
        staged: list[tuple[Held, T]] = []
        try:
            with HubFolder(folder, allow_pickle=allow_pickle) as held:
                lacks = allow_missing and not self.fresh.was_meta
                sources = parts_in(
                    self.module, wanted, held.tensors, allow_missing=lacks, allow_unexpected=allow_unexpected
                )
                found = self._read(held, sources, staged)
        except Exception as one:
            error = known(one)
        try:
            self.meeting.agree(error)
        except BaseException:
            self.fresh.undo()
            raise
        with torch.no_grad():
            for one, values in staged:
                one.stored.local.copy_(values)
        assert found is not None
        return found

    def _read(self, held: HubFolder, sources: Sources, staged: list[tuple[Held, T]]) -> Loaded:
        if self.fresh.was_meta:
            self.fresh.allocate(self.device, self.rebuild)
        every = targets(self.place)
        if self.fresh.was_meta:
            _check_filled(every, sources, str(held.folder))
        filled = [one for one in every if plain_name(one) in sources.by_name]
        _check_dtypes(held, sources, filled)
        rooms: list[tuple[Held, T]] = []
        for one in filled:
            local = one.stored.local
            rooms.append(
                (one, self.fresh.room(one) if self.fresh.was_meta else room_for(one.stored, local.dtype, self.arena))
            )
        jobs = [job for one, room in rooms for job in _jobs(one, room, sources)]
        jobs.sort(key=lambda job: (held.place(job.source), job.box))
        total = sum(volume(job.box) * job.out.element_size() for job in jobs)
        with Progress("loading", self.meeting.leads, total) as progress, torch.no_grad():
            for job in jobs:
                held.read(job.source, job.box, job.out)
                progress(volume(job.box) * job.out.element_size())
            _compute(held, sources, rooms)
            _compare_twins(held, sources, jobs)
        if not self.fresh.was_meta:
            staged += rooms
        held_bytes = sum(one.stored.local.numel() * one.stored.local.element_size() for one in filled)
        return Loaded(held.bytes_read, held_bytes)


def wanted_of(place: Place, meeting: Meeting) -> list[Wanted]:
    """Every tensor of the whole model, those of other pipeline stages too. A collective."""
    own = []
    if place.is_first:
        parameters = {place.canonical(names[0]) for names, _ in named_once(place.module)}
        for one in targets(place):
            name = plain_name(one)
            names = _all_names(place, one)
            own.append([name, names, list(one.stored.shape), name not in parameters])
    found: dict[str, Wanted] = {}
    for name, names, shape, is_buffer in (one for rank in meeting.all(own) for one in rank):
        found.setdefault(name, Wanted(name, tuple(names), tuple(shape), is_buffer))
    return list(found.values())


def _all_names(place: Place, one: Held) -> list[str]:
    facts = place.cut.facts.parameters.get(plain_name(one)) if place.cut is not None else None
    return list(facts.names if facts is not None else one.stored.names)


def plain_name(one: Held) -> str:
    return one.name.removeprefix("model/")


@dataclass(frozen=True)
class _Job:
    """A box of a tensor of the folder, into a view with its shape."""

    source: str
    box: Box
    out: T


def _jobs(one: Held, room: T, sources: Sources) -> Iterable[_Job]:
    found = sources.by_name[plain_name(one)]
    if isinstance(found, Computed):
        return
    for pair in one.stored.pieces:
        wanted = box_of(pair.full)
        for part in found:
            shared = common(wanted, part.target)
            if shared is not None:
                local = moved(moved(shared, starts(wanted)), [-side.start for side in pair.local])
                yield _Job(part.source, part.source_box(shared), as_source(room[slices_of(local)], part))


def as_source(view: T, part: Part) -> T:
    """A part of the target, with its dims in the source's order."""
    used = [dim for dim in part.dims if dim is not None]
    for dim in reversed(range(view.ndim)):
        if dim not in used:
            view = view.squeeze(dim)
    order = sorted(used)
    view = view.permute([order.index(dim) for dim in used])
    for place, along in enumerate(part.dims):
        if along is None:
            view = view.unsqueeze(place)
    return view


def _compute(held: HubFolder, sources: Sources, rooms: Sequence[tuple[Held, T]]) -> None:
    """Tensors that no boxes make: from whole ones, one at a time."""
    for one, room in rooms:
        found = sources.by_name[plain_name(one)]
        if isinstance(found, Computed):
            full = found.compute({name: _whole(held, name) for name in found.sources})
            for pair in one.stored.pieces:
                room[pair.local] = full[pair.full].to(room.dtype)


def _whole(held: HubFolder, name: str) -> T:
    dtype, shape = held.tensors[name]
    full = torch.empty(shape, dtype=torch_dtype(dtype))
    held.read(name, whole_box(shape), full)
    return full


def _compare_twins(held: HubFolder, sources: Sources, jobs: Sequence[_Job]) -> None:
    """Two tensors for one tied parameter must be equal, or the tie is not what was trained."""
    for used, ignored in sources.twins:
        for job in jobs:
            if job.source == used:
                other = torch.empty(shape_of(job.box), dtype=job.out.dtype)
                held.read(ignored, job.box, other)
                if not torch.equal(other, job.out.cpu()):
                    what = f"holds two different tensors for one tied parameter: {used} and {ignored}"
                    fix = "set tie_word_embeddings=False in the model's config, or remove one of them"
                    raise CheckpointError(Problem("twins-differ", what, str(held.folder), fix=fix))


def _check_filled(every: Sequence[Held], sources: Sources, where: str) -> None:
    """What the class says a folder may lack has no values on meta."""
    empty = [plain_name(one) for one in every if plain_name(one) not in sources.by_name]
    if empty:
        what = f"{short_list(empty, 6)} may be missing, and is: on meta there are no values to keep"
        fix = "initialize(model, seed) first, then load_pretrained(model, folder)"
        raise CheckpointError(Problem("missing-tensor", what, where, fix=fix))


def _check_dtypes(held: HubFolder, sources: Sources, filled: Sequence[Held]) -> None:
    """Whole numbers stay what they are; floating numbers become the model's."""
    problems = []
    for one in filled:
        found = sources.by_name[plain_name(one)]
        names = found.sources if isinstance(found, Computed) else [part.source for part in found]
        for name in dict.fromkeys(names):
            dtype = torch_dtype(held.tensors[name][0])
            if dtype != one.stored.local.dtype and not (
                dtype.is_floating_point and one.stored.local.is_floating_point()
            ):
                what = f"{name} is {held.tensors[name][0]}, the model's {plain_name(one)} {one.stored.local.dtype}"
                problems.append(Problem("wrong-dtype", what, str(held.folder)))
    if problems:
        raise CheckpointError(*problems[:20])
