"""Devices behind a mesh: building a `DeviceMesh`, and process groups for any list of ranks.

`Group` is the small interface through which every op reaches the network.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelize import _torch_private as private
from parallelize.errors import MeshError, Problem
from parallelize.hardware import LinkProfile
from parallelize.mesh import AXES, MeshSpec

# torch 2.13 renamed these two, and warns about the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_BY_KEY: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # key -> Group

_PROFILES: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()  # process group -> profiles

Wire = Callable[[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor], int], list[Any]]
"""(send, receive, tag) -> objects to wait for; tensors by the peer's rank in the group."""


class Group:
    """Ranks that communicate: a process group with its size and this rank's place in it.

    Collectives work on contiguous tensors. A copy of a model shares its groups, so copying returns the same object.
    """

    __slots__ = ("__weakref__", "backends", "key", "pg", "rank", "ranks", "size", "traffic", "wire")

    backends: dict[str, str]
    key: str
    pg: dist.ProcessGroup
    rank: int
    ranks: tuple[int, ...]
    size: int
    traffic: list[tuple[str, int]] | None  # what overlapped ops have sent, while somebody records it
    wire: Wire | None  # carries messages in the place of the process group

    def __new__(cls, pg: dist.ProcessGroup) -> Group:
        """One object a process group, so that what is set on it holds wherever it is found."""
        key = f"{pg.rank()}:{pg.group_name}"
        known = _BY_KEY.get(key)
        if known is not None and known.pg is pg:
            return known
        group = _BY_KEY[key] = super().__new__(cls)
        group.pg, group.key = pg, key
        group.traffic = group.wire = None
        group.size, group.rank = pg.size(), pg.rank()
        group.ranks = tuple(dist.get_process_group_ranks(pg))
        group.backends = _backends(pg)
        return group

    @property
    def profiles(self) -> dict[tuple[str, torch.dtype], LinkProfile]:
        """What calibration found or was given, by device type and dtype. Lives as long as the process group."""
        return _PROFILES.setdefault(self.pg, {})

    def backend(self, device: torch.device) -> str:
        """What carries tensors of this device: "gloo", "nccl", ..."""
        return self.backends.get(device.type) or self.backends.get("", "")

    @staticmethod
    def by_key(key: str) -> Group:
        """The group whose `key` stands in a graph or an op's arguments, where only text can stand."""
        if not key:
            return Group.alone()
        group = _BY_KEY.get(key)
        if group is not None:
            return group
        rank, _, name = key.partition(":")
        found = [pg for pg in private.known_groups() if pg.group_name == name and pg.rank() == int(rank)]
        if not found:
            raise MeshError(Problem("no-such-group", f"process group {name!r} does not exist (any more)"))
        return Group(found[0])

    def simulated(self, rank: int, wire: Wire) -> Group:
        """This group as one of its ranks sees it, with messages carried by `wire`: for simulation in one process."""
        group = object.__new__(Group)
        group.pg, group.key, group.ranks, group.size = self.pg, self.key, self.ranks, self.size
        group.rank, group.wire, group.backends = rank, wire, {"": "simulated"}
        group.traffic = None
        return group

    @staticmethod
    def alone() -> Group:
        """A group of one rank, without a process group."""
        group = object.__new__(Group)
        group.pg, group.key, group.ranks, group.size, group.rank = None, "", (0,), 1, 0  # type: ignore[assignment]
        group.backends, group.traffic, group.wire = {}, None, None
        return group

    @contextmanager
    def recording(self) -> Iterator[list[tuple[str, int]]]:
        """What this rank sends in overlapped ops meanwhile: (kind, bytes) of each step, in order."""
        kept, self.traffic = self.traffic, []
        try:
            yield self.traffic
        finally:
            self.traffic = kept

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self.pg is other.pg

    def __hash__(self) -> int:
        return id(self.pg)

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict) -> Group:
        return self

    def __repr__(self) -> str:
        return f"Group(rank {self.rank} of {self.ranks})"

    def all_reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce `x` in place."""
        dist.all_reduce(x, op, group=self.pg)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] on each rank -> [size, ...], in rank order."""
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:])) if x.ndim else x.new_empty((self.size,))
        _all_gather(out, x if x.ndim else x.reshape(1), group=self.pg)
        return out.view(self.size, *x.shape)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor) -> Any:
        """[n, ...] on each rank -> `out` [size * n, ...], of which `x` may be this rank's own part. Wait for what it returns."""
        return _all_gather(out, x, group=self.pg, async_op=True)

    def reduce_scatter_into(self, out: torch.Tensor, x: torch.Tensor) -> Any:
        """[size * n] on each rank -> the sum's own [n] in `out`. Wait for what it returns."""
        return _reduce_scatter(out, x, group=self.pg, async_op=True)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * n, ...] -> the sum's own [n, ...]."""
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        _reduce_scatter(out, x, group=self.pg)
        return out

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """[sum of sent] -> [sum of received]: flat, split by rank into so many elements."""
        out = x.new_empty(sum(received))
        dist.all_to_all_single(out, x, received, sent, group=self.pg)
        return out

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Overwrite `x` with that of the group's rank `source`."""
        dist.broadcast(x, self.ranks[source], group=self.pg)


def _backends(pg: dist.ProcessGroup) -> dict[str, str]:
    """Device type to backend; a group has one for each where it was made without naming any. "" stands for the rest."""
    backends = {"": str(dist.get_backend(pg))}
    for pair in str(dist.get_backend_config(pg)).split(","):
        device, _, backend = pair.partition(":")
        if backend:
            backends[device.strip()] = backend.strip()
    return backends


def build_mesh(device_type: str, **sizes: int) -> DeviceMesh:
    """A `DeviceMesh` from named sizes: `build_mesh("cuda", dp=2, tp=4)`. The last axis holds neighbouring ranks.

    Raises: MeshError `wrong-world-size` where the sizes do not multiply to the number of processes, `no-device`.
    """
    if not sizes:
        raise MeshError(Problem("no-axes", "a mesh needs named axes", fix='build_mesh("cuda", dp=2, tp=4)'))
    spec = MeshSpec(tuple(sizes.items()))
    _check_device(device_type)
    world = dist.get_world_size() if dist.is_initialized() else None
    if world is not None and world != spec.world_size:
        raise MeshError(
            Problem(
                "wrong-world-size",
                f"{spec} makes {spec.world_size} ranks, and {world} processes run",
                fix=f"change a size, or start {spec.world_size} processes: torchrun --nproc-per-node {spec.world_size}",
            )
        )
    return init_device_mesh(device_type, spec.sizes, mesh_dim_names=spec.names)


def _check_device(device_type: str) -> None:
    accelerator = torch.accelerator.current_accelerator()
    known = ["cpu", *([accelerator.type] if accelerator is not None else [])]
    if device_type not in known:
        raise MeshError(Problem("no-device", f"this machine has no {device_type!r}", fix="one of: " + ", ".join(known)))


def mesh_spec(mesh: DeviceMesh) -> MeshSpec:
    """The mesh's names and sizes, without its devices. A 1-D mesh without a name is `tp`."""
    names = mesh.mesh_dim_names or (("tp",) if mesh.ndim == 1 else tuple(f"axis{i}" for i in range(mesh.ndim)))
    return MeshSpec(list(zip(names, mesh.shape, strict=True)))


def tp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh that tensor parallelism uses: the axis named `tp`, or a 1-D mesh of another name.

    Raises: MeshError `no-tp-axis`.
    """
    names = mesh.mesh_dim_names
    if names and "tp" in names:
        return mesh["tp"] if mesh.ndim > 1 else mesh
    if mesh.ndim == 1 and (not names or names[0] not in AXES):
        return mesh
    raise MeshError(
        Problem(
            "no-tp-axis",
            f"the mesh {mesh_spec(mesh)} has no axis named tp",
            fix='name one: build_mesh("cuda", dp=2, tp=4), or pass a 1-D mesh',
        )
    )


def group_for(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The process group of these global ranks, made at most once. Call it on every rank of the list.

    Raises: MeshError `not-in-group` on a rank outside the list.
    """
    wanted = tuple(ranks)
    if dist.get_rank() not in wanted:
        raise MeshError(Problem("not-in-group", f"rank {dist.get_rank()} asks for the group of ranks {list(wanted)}"))
    for group in private.known_groups():
        same_network = dist.get_backend(group) == dist.get_backend()
        if same_network and tuple(dist.get_process_group_ranks(group)) == wanted:
            return group
    return dist.new_group(list(wanted), use_local_synchronization=True)


def axis_group(mesh: DeviceMesh, *axes: str) -> dist.ProcessGroup:
    """The group of this rank along the product of `axes`. Call it on every rank of the mesh."""
    if len(axes) == 1:
        return mesh.get_group(axes[0]) if mesh.mesh_dim_names else mesh.get_group()
    spec = mesh_spec(mesh)
    flat = mesh.mesh.flatten().tolist()
    place = flat.index(dist.get_rank())
    return group_for([flat[index] for index in spec.group_of(place, *axes)])


def destroy_groups() -> None:
    """End every process group, and wait until gloo's threads have let go of their last tensors.

    Such a thread needs Python's lock to free a tensor. If the interpreter is ending by then, it is killed inside a C++
    destructor and the process aborts ("terminate called without an active exception") although all went well.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(_LET_GO_S)


_LET_GO_S = 0.1
