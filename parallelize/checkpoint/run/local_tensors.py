"""The tensors of a training state on this rank, and the part of each that this rank writes.

Every rank decides by itself, from its coordinates in the mesh: no message is needed, and no tensor is sent. Elements
that several ranks store are written once; large ones are split among those ranks, so that all of them write.
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

from parallelize.axes.zero.shard_data import data_of
from parallelize.base.boxes import Box
from parallelize.base.errors import CheckpointError, ModelError, Problem
from parallelize.base.layout import even_interval, replicated
from parallelize.base.mesh import EXPERT_AXES
from parallelize.checkpoint.format.device_pieces import code_of
from parallelize.checkpoint.format.saved_slices import key_of
from parallelize.comm.mesh_view import AnyMesh, MeshView
from parallelize.plan.model_facts import named_once
from parallelize.state.full_values import master_weights
from parallelize.state.later_changes import take_changes
from parallelize.state.records import Cut, mesh_of, pipeline_cut, record_of
from parallelize.state.stored_slices import StoredSlices, StoredTensor

T = torch.Tensor
SPLIT_BYTES = 4 << 20
"""Elements that several ranks store are split among them in parts of at least this many bytes."""


@dataclass(frozen=True)
class BoxToWrite:
    """A box of a full tensor that this rank writes. `key`: its name in the file. `value`: a view of the local
    tensor."""

    key: str
    box: Box
    value: T


@dataclass(frozen=True)
class LocalTensor:
    """One tensor of the state, as this rank stores it.

    Attributes:
        name: the name in the checkpoint.
        replica, num_replicas: the index of this rank among the ranks that store the same elements, and their number.
        owner: False if another pipeline stage writes the tensor.
        single_writer: never split among the replicas, as for buffers, whose copies may differ.
        about: what the manifest says about it.
    """

    name: str
    stored: StoredTensor
    replica: int = 0
    num_replicas: int = 1
    owner: bool = True
    single_writer: bool = False
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The name that safetensors has for the dtype. Raises: CheckpointError `unsavable-dtype`."""
        code = code_of(self.stored.local.dtype)
        if code is None:
            what = f"{self.name} is of {self.stored.local.dtype}, which safetensors files do not have"
            raise CheckpointError(Problem("unsavable-dtype", what, fix="keep it in another dtype"))
        return code

    def owned(self) -> Iterator[BoxToWrite]:
        """The boxes that this rank writes."""
        if not self.owner:
            return
        # the writer rotates by tensor name, or the first replica would write all small tensors
        turn = (self.replica - zlib.crc32(self.name.encode())) % self.num_replicas
        number = 0
        for pair, is_first in zip(self.stored.slices, self.stored.is_first_holder, strict=True):
            sizes = [side.stop - side.start for side in pair.local]
            parts = self._num_parts(sizes)
            if not is_first or turn >= parts:
                continue
            value, box = self.stored.local[pair.local], pair.box
            if parts > 1:
                start, stop = even_interval(sizes[0], parts, turn)
                if start == stop:
                    continue
                value = value[start:stop]
                box = ((box[0][0] + start, box[0][0] + stop), *box[1:])
            yield BoxToWrite(key_of(self.name, number), box, value)
            number += 1

    def _num_parts(self, sizes: list[int]) -> int:
        """The number of parts, along dim 0, into which the replicas split a block of these sizes."""
        if self.single_writer or not sizes:
            return 1
        num_bytes = math.prod(sizes) * self.stored.local.element_size()
        return min(self.num_replicas, max(1, num_bytes // SPLIT_BYTES), max(1, sizes[0]))


class ModelOnMesh:
    """A model, and this rank's coordinates in the mesh.

    Args:
        mesh: the mesh of all processes. None: the mesh that the model was given; a single process needs none.

    Attributes:
        coordinates: axis -> index of this rank.

    Raises: ModelError `partial-mesh`.
    """

    def __init__(self, module: nn.Module, mesh: AnyMesh | None = None):
        self.module = module
        self.mesh = MeshView.of(mesh) if mesh is not None else mesh_of(module)
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        mesh_size = self.mesh.size if self.mesh is not None else 1
        if mesh_size != world_size:
            what = f"{world_size} processes run, and the model's mesh has {mesh_size} of them"
            raise ModelError(Problem("partial-mesh", what, fix="pass mesh=, with an axis for every group of processes"))
        self.spec = self.mesh.spec if self.mesh is not None else None
        self.coordinates = self.mesh.coordinates if self.mesh is not None else {}
        record = record_of(module)
        self._folded = record.folded if record is not None else None

    @property
    def cut(self) -> Cut | None:
        """As it is now: adapters that came since the plan are named by a new one."""
        return pipeline_cut(self.module)

    def place(self, *axes: str) -> tuple[int, int]:
        """(index, number) of this rank over the product of those of the axes that the mesh has."""
        return self.mesh.place(*axes) if self.mesh is not None else (0, 1)

    def replica(self, axes: frozenset[str]) -> tuple[int, int]:
        """(index, number) of this rank among those that store the same elements of a tensor that `axes` shard."""
        mesh = self._with(axes)
        return mesh.place(*(axis for axis in mesh.spec.names if axis not in axes and axis != "pp")) if mesh else (0, 1)

    def _with(self, axes: frozenset[str]) -> MeshView | None:
        """The mesh that has these axes: experts may be folded over the data axes."""
        return self._folded if axes & set(EXPERT_AXES) else self.mesh

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of its pipeline stage."""
        return all(index == 0 for axis, index in self.coordinates.items() if axis != "pp")

    def canonical(self, name: str) -> str:
        """A parameter's first name in the full model."""
        return self.cut.facts.parameter_fqns.get(name, name) if self.cut is not None else name

    def writes(self, name: str) -> bool:
        """Whether this rank's pipeline stages are the ones that write this parameter or buffer."""
        if self.cut is None:
            return True
        fact = self.cut.facts.parameters.get(self.canonical(name))
        return self.cut.resolved.pp_ranks(fact.names if fact is not None else (name,))[0] == self.cut.group.rank

    def local_tensor(self, name: str, stored: StoredTensor, *, owner: bool, **options: Any) -> LocalTensor:
        """A tensor of the state, with this rank's index among its replicas. Raises: ModelError `unknown-axis`."""
        mesh = self._with(stored.axes)
        unknown = stored.axes - set(mesh.spec.names if mesh is not None else ())
        if unknown:
            axes = ", ".join(self.coordinates) or "none"
            what = f"{name} is sharded over {', '.join(sorted(unknown))}, and the mesh has the axes {axes}"
            raise ModelError(Problem("unknown-axis", what, fix="pass mesh=, with the axes that shard the parameters"))
        return LocalTensor(name, stored, *self.replica(stored.axes), owner=owner, **options)


def model_on_mesh(model: Any, mesh: DeviceMesh | None = None) -> tuple[nn.Module, ModelOnMesh]:
    """The module of a `ParallelModel`, or a module itself, and this rank's coordinates."""
    if isinstance(model, nn.Module):
        module = bare(model)
        return module, ModelOnMesh(module, mesh)
    module = bare(model.module)
    return module, ModelOnMesh(module, mesh if mesh is not None else model.mesh)


def bare(module: nn.Module) -> nn.Module:
    """The model inside `torch.compile` and DistributedDataParallel; checkpoints use its names.

    Raises: ModelError `wrapped-model` for another wrapper around what this package made.
    """
    while True:
        inner = module._modules.get("_orig_mod")
        inner = module.module if isinstance(module, DistributedDataParallel) else inner
        if not isinstance(inner, nn.Module):
            break
        module = inner
    for name, submodule in module.named_modules():
        if name and mesh_of(submodule) is not None and mesh_of(module) is None:
            what = f"the model that was parallelized is {name} inside a {type(module).__name__}"
            fix = f"pass .{name} itself, and the rest as user={{...}}"
            raise ModelError(Problem("wrapped-model", what, fix=fix))
    return module


def weights(on_mesh: ModelOnMesh) -> list[LocalTensor]:
    """The model's parameters in the dtype in which they are stepped, and its persistent buffers: `model/<name>`."""
    take_changes(on_mesh.module)
    return parameters(on_mesh, master_weights(on_mesh.module))


def parameters(on_mesh: ModelOnMesh, masters: Mapping[int, Any] | None = None) -> list[LocalTensor]:
    """The model's own parameters and persistent buffers. `masters`: id of a parameter -> what is saved instead of
    it."""
    take_changes(on_mesh.module)
    data, where, masters = data_of(on_mesh.module), StoredSlices(on_mesh.module), masters or {}
    compute = getattr(data, "compute", None)
    tensors = []
    for names, parameter in named_once(on_mesh.module):
        stored = where.of(names, masters.get(id(parameter), parameter))
        compute_dtype = compute if compute is not None and parameter.is_floating_point() else parameter.dtype
        about = _about(on_mesh, names, compute_dtype, stored)
        name = on_mesh.canonical(names[0])
        tensors.append(on_mesh.local_tensor(f"model/{name}", stored, owner=on_mesh.writes(names[0]), about=about))
    return tensors + buffers(on_mesh)


def targets(on_mesh: ModelOnMesh) -> list[LocalTensor]:
    """What loading fills: every parameter as the model stores it, the float32 copies of the optimizer, and buffers."""
    take_changes(on_mesh.module)
    data, where = data_of(on_mesh.module), StoredSlices(on_mesh.module)
    names_of = {id(parameter): names for names, parameter in named_once(on_mesh.module)}

    def target(names: tuple[str, ...], parameter: Any) -> LocalTensor:
        name = f"model/{on_mesh.canonical(names[0])}"
        return on_mesh.local_tensor(name, where.of(names, parameter), owner=True)

    tensors = [target(names, parameter) for names, parameter in named_once(on_mesh.module)]
    masters = [shard for shard in data.shards if shard.has_master] if data is not None else []
    tensors += [target(names_of[id(shard.param)], shard.stepped) for shard in masters]
    return tensors + buffers(on_mesh)


def buffers(on_mesh: ModelOnMesh) -> list[LocalTensor]:
    """Buffers that a state dict contains, each name by itself. The first of all replicas writes them."""
    tensors = []
    for prefix, owner in on_mesh.module.named_modules():
        for key, buffer in owner._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            if buffer is not None and key not in owner._non_persistent_buffers_set:
                shape = tuple(buffer.shape)
                stored = StoredTensor(name, (name,), buffer.detach(), shape, replicated(shape, 1).slices(0))
                is_owner = on_mesh.writes(name) and on_mesh.is_first
                tensors.append(LocalTensor(f"model/{name}", stored, owner=is_owner, single_writer=True))
    return tensors


def _about(on_mesh: ModelOnMesh, names: tuple[str, ...], compute: torch.dtype, stored: StoredTensor) -> dict[str, Any]:
    """What a tool without the model needs: other names, compute dtype, how tensor parallelism may shard the tensor."""
    about: dict[str, Any] = {}
    canonical = on_mesh.canonical(names[0])
    all_names = on_mesh.cut.facts.parameters[canonical].names if on_mesh.cut is not None else names
    if len(all_names) > 1:
        about["names"] = list(all_names)
    if compute != stored.local.dtype and (code := code_of(compute)) is not None:
        about["compute"] = code
    record = record_of(on_mesh.module)
    row = record.resolved.parameters.get(names[0]) if record is not None else None
    if row is not None and row.layout.dim is not None:
        about["cut"] = [row.layout.dim, [[c.size, c.units, c.replicable] for c in row.layout.chunks]]
    return about
