"""What this rank holds of a training state, tensor by tensor, and which part of it this rank writes.

Every rank decides alone, from its place in the mesh: no message is needed, and no tensor moves. Elements that several ranks
hold are written once; large ones are shared out over those ranks, so that all of them write.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from parallelize.checkpoint.boxes import Box, box_of
from parallelize.checkpoint.memory import code_of
from parallelize.errors import CheckpointError, ModelError, Problem
from parallelize.groups import mesh_spec
from parallelize.layout import even_interval, replicated
from parallelize.pieces import Places, Stored, named_once
from parallelize.pipeline.cut import Cut, cut_of
from parallelize.sharding import record_of
from parallelize.zero.apply import data_of

T = torch.Tensor
SPLIT_BYTES = 4 << 20
"""Elements that several ranks hold are shared out in parts of at least so many bytes."""


@dataclass(frozen=True)
class Owned:
    """A box of a full tensor that this rank writes. `key`: its name in the file. `value`: a view of what the rank holds."""

    key: str
    box: Box
    value: T


@dataclass(frozen=True)
class Held:
    """One tensor of the state, as far as this rank holds it.

    Attributes:
        name: in the checkpoint. place, copies: which of how many equal holders this rank is. owner: False where another
            pipeline stage writes it. whole: it is never shared out (buffers, which copies may hold in different states).
    """

    name: str
    stored: Stored
    place: int = 0
    copies: int = 1
    owner: bool = True
    whole: bool = False
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Raises: CheckpointError `unsavable-dtype`."""
        code = code_of(self.stored.local.dtype)
        if code is None:
            what = f"{self.name} is of {self.stored.local.dtype}, which safetensors files do not know"
            raise CheckpointError(Problem("unsavable-dtype", what, fix="keep it in another dtype"))
        return code

    def owned(self) -> Iterator[Owned]:
        """The boxes that this rank writes."""
        if not self.owner:
            return
        number = 0
        for pair, mine in zip(self.stored.pieces, self.stored.mine, strict=True):
            rows = self._rows(pair) if mine else None
            if rows is None:
                continue
            value, box = self.stored.local[pair.local], box_of(pair.full)
            if rows != (0, -1):
                value = value[rows[0] : rows[1]]
                box = ((box[0][0] + rows[0], box[0][0] + rows[1]), *box[1:])
            yield Owned(self.name if number == 0 else f"{self.name}@{number}", box, value)
            number += 1

    def _rows(self, pair: Any) -> tuple[int, int] | None:
        """This rank's part of a piece that `copies` ranks hold: rows, (0, -1) for all of it, None for nothing."""
        sizes = [part.stop - part.start for part in pair.local]
        turn = (self.place - zlib.crc32(self.name.encode())) % self.copies
        num_bytes = math.prod(sizes) * self.stored.local.element_size()
        parts = 1 if self.whole or not sizes else min(self.copies, max(1, num_bytes // SPLIT_BYTES), max(1, sizes[0]))
        if parts == 1:
            return (0, -1) if turn == 0 else None
        start, stop = even_interval(sizes[0], parts, turn) if turn < parts else (0, 0)
        return (start, stop) if stop > start else None


class Place:
    """Where this rank stands: in the mesh, and among the ranks that hold the same.

    Args:
        mesh: of all processes. None: what the model was given; a single process needs none.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh | None = None):
        self.module, self.cut = module, cut_of(module)
        self.mesh = mesh if mesh is not None else _mesh_of(module, self.cut)
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        held = self.mesh.size() if self.mesh is not None else 1
        if held != world:
            what = f"{world} processes run, and the model's mesh has {held} of them"
            raise ModelError(Problem("partial-mesh", what, fix="pass mesh=, with an axis for every group of processes"))
        self.spec = mesh_spec(self.mesh) if self.mesh is not None else None
        self.here: dict[str, int] = {}
        if self.spec is not None and self.mesh is not None:
            place = self.mesh.mesh.flatten().tolist().index(dist.get_rank())
            self.here = self.spec.coordinates(place)

    def among_copies(self, axes: frozenset[str]) -> tuple[int, int]:
        """(place, number) of this rank among those that hold the same elements of what is cut over `axes`."""
        place, number = 0, 1
        for axis, size in self.spec.axes if self.spec is not None else ():
            if axis not in axes and axis != "pp":
                place, number = place * size + self.here[axis], number * size
        return place, number

    @property
    def is_first(self) -> bool:
        """Whether this rank comes first of its pipeline stage."""
        return all(index == 0 for axis, index in self.here.items() if axis != "pp")

    def canonical(self, name: str) -> str:
        """A parameter's first name in the whole model."""
        return self.cut.facts.owners.get(name, name) if self.cut is not None else name

    def writes(self, name: str) -> bool:
        """Whether this rank's pipeline stages are the ones that write this parameter or buffer."""
        if self.cut is None:
            return True
        stages = self.cut.stages.owners.get(self.canonical(name), ())
        stage = stages[0] if stages else self.cut.stages.stage_of(name)
        return self.cut.places[stage or 0] == self.cut.group.rank

    def held(self, name: str, stored: Stored, owner: bool, **more: Any) -> Held:
        strange = stored.axes - set(self.here)
        if strange:
            what = f"{name} is cut over {', '.join(sorted(strange))}, and the mesh has the axes {', '.join(self.here) or 'none'}"
            raise ModelError(Problem("unknown-axis", what, fix="pass mesh=, with the axes that cut the parameters"))
        return Held(name, stored, *self.among_copies(stored.axes), owner=owner, **more)


def placed(model: Any, mesh: DeviceMesh | None = None) -> tuple[nn.Module, Place]:
    """The module of a `ParallelModel`, or a module itself, and where this rank stands."""
    module = bare(model if isinstance(model, nn.Module) else model.module)
    known = None if isinstance(model, nn.Module) else model.mesh
    return module, Place(module, mesh if mesh is not None else known)


def bare(module: nn.Module) -> nn.Module:
    """The model inside `torch.compile` and DistributedDataParallel, under whose names everything is kept.

    Raises: ModelError `wrapped-model` for another wrapper around what this package made.
    """
    while True:
        inner = module._modules.get("_orig_mod")
        inner = module.module if isinstance(module, DistributedDataParallel) else inner
        if not isinstance(inner, nn.Module):
            break
        module = inner
    marks = ("_parallelize_record", "_parallelize_data", "_parallelize_cut")
    for name, one in module.named_modules():
        if name and any(mark in one.__dict__ for mark in marks) and not any(mark in module.__dict__ for mark in marks):
            what = f"the model that was parallelised is {name} inside of a {type(module).__name__}"
            raise ModelError(Problem("wrapped-model", what, fix=f"give .{name} itself, and the rest as user={{...}}"))
    return module


def _mesh_of(module: nn.Module, cut: Cut | None) -> DeviceMesh | None:
    data, record = data_of(module), record_of(module)
    meshes = [one.mesh for one in (data, cut, record) if one is not None]
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def weights(place: Place) -> list[Held]:
    """The model's parameters in the dtype in which they are stepped, and its persistent buffers: `model/<name>`."""
    data = data_of(place.module)
    masters = {id(shard.param): shard.stepped for shard in data.shards if shard.has_master} if data is not None else {}
    return parameters(place, masters)


def parameters(place: Place, masters: Mapping[int, Any] | None = None) -> list[Held]:
    """The model's own parameters and persistent buffers, with `masters` (id of a parameter -> what stands for it)."""
    data, where, masters = data_of(place.module), Places(place.module), masters or {}
    compute = getattr(data, "compute", None)
    found = []
    for names, parameter in named_once(place.module):
        stored = where.of(names, masters.get(id(parameter), parameter))
        narrow = compute if parameter.is_floating_point() else None
        about = _about(place, names, narrow or parameter.dtype, stored)
        name = place.canonical(names[0])
        found.append(place.held(f"model/{name}", stored, place.writes(names[0]), about=about))
    return found + buffers(place)


def targets(place: Place) -> list[Held]:
    """What loading fills: every parameter as the model holds it, the float32 copies beside them, buffers."""
    data, where = data_of(place.module), Places(place.module)
    found = [
        place.held(f"model/{place.canonical(names[0])}", where.of(names, parameter), True)
        for names, parameter in named_once(place.module)
    ]
    names_of = {id(parameter): names for names, parameter in named_once(place.module)}
    for shard in data.shards if data is not None else ():
        if shard.has_master:
            names = names_of[id(shard.param)]
            found.append(place.held(f"model/{place.canonical(names[0])}", where.of(names, shard.stepped), True))
    return found + buffers(place)


def buffers(place: Place) -> list[Held]:
    """Buffers that a state dict holds, each name by itself. The first of all copies writes them."""
    found = []
    for prefix, owner in place.module.named_modules():
        for key, buffer in owner._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if buffer is not None and key not in owner._non_persistent_buffers_set:
                pieces = replicated(tuple(buffer.shape), 1).slices(0)
                stored = Stored(name, (name,), buffer.detach(), tuple(buffer.shape), pieces)
                owned = place.writes(name) and place.is_first
                found.append(Held(f"model/{name}", stored, owner=owned, whole=True))
    return found


def _about(place: Place, names: tuple[str, ...], compute: torch.dtype, stored: Stored) -> dict[str, Any]:
    """What a tool that has no model needs to know: other names, dtype of compute, how tensor parallelism may cut it."""
    about: dict[str, Any] = {}
    everywhere = place.cut.facts.parameters[place.canonical(names[0])].names if place.cut is not None else names
    if len(everywhere) > 1:
        about["names"] = list(everywhere)
    if compute != stored.local.dtype and (code := code_of(compute)) is not None:
        about["compute"] = code
    record = record_of(place.module)
    row = record.resolved.parameters.get(names[0]) if record is not None else None
    if row is not None and row.layout.dim is not None:
        about["cut"] = [row.layout.dim, [[c.size, c.units, c.replicable] for c in row.layout.chunks]]
    return about
