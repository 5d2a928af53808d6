"""Process groups: of an axis of a mesh, and of any list of ranks.

`Group` is the interface through which every op communicates.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.errors import MeshError, ModelError, Problem
from parallelize.base.mesh import short_name
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.base.torch_private.torch_tensors import counts_collectives
from parallelize.comm import blocking, functional, wired_exchange
from parallelize.comm.link_profile import LinkProfile
from parallelize.comm.meshes import mesh_spec
from parallelize.comm.shared_memory import SharedMemory
from parallelize.comm.turns import takes_turns, yield_turn

_BY_KEY: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # key -> Group

Wire = Callable[[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor], int], list[Any]]
"""(send, receive, tag) -> objects to wait for; tensors by the peer's rank in the group."""


class GroupState:
    """What was learned about a process group. It lives as long as the process group; a `Group` may be collected
    earlier.

    Attributes:
        profiles: results of calibration by device type and dtype.
        posted: lines that this rank has compared through the store (see `ops.matmul.op_handshake`).
        first_choices: what the group's first rank decided, by line.
        store_prefix: where the lines of this group are in the store; empty before the first one.
        shared_memory: what its ranks have mapped (see `same_host`). has_no_shared_memory: they have tried, and cannot.
        no_symmetric_memory: why they cannot use symmetric memory, empty if they can; None until they have tried.
    """

    __slots__ = (
        "first_choices",
        "has_no_shared_memory",
        "no_symmetric_memory",
        "posted",
        "profiles",
        "shared_memory",
        "store_prefix",
    )

    def __init__(self) -> None:
        self.profiles: dict[tuple[str, torch.dtype], LinkProfile] = {}
        self.posted: set[str] = set()
        self.first_choices: dict[str, str] = {}
        self.store_prefix = ""
        self.shared_memory: SharedMemory | None = None
        self.has_no_shared_memory = False
        self.no_symmetric_memory: str | None = None

    def forget_lines(self) -> None:
        """Begin anew in the store: all ranks do after a disagreement, or they would count different lines."""
        self.posted.clear()
        self.first_choices.clear()
        self.store_prefix = ""


_STATES: weakref.WeakKeyDictionary[Any, GroupState] = weakref.WeakKeyDictionary()  # process group -> its state


class Group:
    """A process group with its size and this rank's index in it.

    Collectives take contiguous tensors. A copy of a model shares its groups, so copying returns the same object.

    Args:
        pg: the process group, of which this process is a member.

    Attributes:
        rank: this process's index in the group. ranks: the global ranks of the group, in order.
        key: identifies the group in a graph or in the arguments of an op.
        backends: backend by device type; "" for any other device.
        state: what was learned about the process group.
        traffic: (kind, bytes) of what overlapped ops have sent, while it is recorded.
        wire: carries messages instead of the process group, in a simulation.
    """

    __slots__ = ("__weakref__", "backends", "key", "pg", "rank", "ranks", "size", "state", "traffic", "wire")

    backends: dict[str, str]
    key: str
    pg: dist.ProcessGroup
    rank: int
    ranks: tuple[int, ...]
    size: int
    state: GroupState
    traffic: list[tuple[str, int]] | None
    wire: Wire | None

    def __new__(cls, pg: dist.ProcessGroup) -> Group:
        """One object per process group, so that what is set on it holds wherever the group is used."""
        key = f"{pg.rank()}:{pg.group_name}"
        existing = _BY_KEY.get(key)
        if existing is not None and existing.pg is pg:
            return existing
        group = _BY_KEY[key] = super().__new__(cls)
        group.pg, group.key = pg, key
        group.traffic = group.wire = None
        group.size, group.rank = pg.size(), pg.rank()
        group.ranks = tuple(dist.get_process_group_ranks(pg))
        group.backends = _backends(pg)
        group.state = _STATES.setdefault(pg, GroupState())
        return group

    @property
    def profiles(self) -> dict[tuple[str, torch.dtype], LinkProfile]:
        """Measured or user-provided profiles by device type and dtype. They live as long as the process group."""
        return self.state.profiles

    def backend(self, device: torch.device) -> str:
        """The backend for tensors on this device: "gloo", "nccl", ..."""
        return self.backends.get(device.type) or self.backends.get("", "")

    @property
    def device(self) -> torch.device:
        """The device of the group's messages, for a rank that has no tensor of its own to send."""
        serves_cuda = "cuda" in self.backends or "nccl" in self.backends.values()
        if serves_cuda and torch.cuda.is_available():  # a group may name a backend of devices that this machine has not
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @staticmethod
    def by_key(key: str) -> Group:
        """The group with this `key`: graphs and arguments of ops can contain text, but no group.

        Raises: MeshError `no-such-group`.
        """
        if not key:
            return Group.alone()
        group = _BY_KEY.get(key)
        if group is not None:
            return group
        rank, _, name = key.partition(":")
        for pg in private_groups.known_groups():
            if pg.group_name == name and pg.rank() == int(rank):
                return Group(pg)
        raise MeshError(Problem("no-such-group", f"process group {name!r} does not exist (any more)"))

    def simulated(self, rank: int, wire: Wire) -> Group:
        """This group as seen by one of its ranks, with messages carried by `wire`: for simulation in one process."""
        group = object.__new__(Group)
        group.pg, group.key, group.ranks, group.size = self.pg, self.key, self.ranks, self.size
        group.rank, group.wire, group.backends = rank, wire, {"": "simulated"}
        group.traffic, group.state = None, self.state
        return group

    @staticmethod
    def alone() -> Group:
        """A group of one rank, without a process group."""
        group = object.__new__(Group)
        group.pg, group.key, group.ranks, group.size, group.rank = None, "", (0,), 1, 0  # type: ignore[assignment]
        group.backends, group.traffic, group.wire, group.state = {}, None, None, GroupState()
        return group

    @contextmanager
    def recording(self) -> Iterator[list[tuple[str, int]]]:
        """Record what this rank sends in overlapped ops: (kind, bytes) of each step, in order."""
        outer, self.traffic = self.traffic, []
        try:
            yield self.traffic
        finally:
            self.traffic = outer

    @contextmanager
    def not_recording(self) -> Iterator[None]:
        """Leave what is sent inside out of a recording."""
        outer, self.traffic = self.traffic, None
        try:
            yield
        finally:
            self.traffic = outer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self.pg is other.pg

    def __hash__(self) -> int:
        return id(self.pg)

    def __copy__(self) -> Group:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self

    def __reduce__(self) -> NoReturn:
        """Raises: ModelError `model-in-groups`: what refers to a process group exists on its ranks alone."""
        raise in_groups()

    def __repr__(self) -> str:
        return f"Group(rank {self.rank} of {self.ranks})"

    def all_reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce `x` in place."""
        if op is dist.ReduceOp.SUM:
            blocking.all_reduce(x, self.pg)
        elif not torch.compiler.is_compiling() and counts_collectives():
            functional.all_reduce(x, self.pg, op.name.lower())
        elif op is dist.ReduceOp.MAX and (memory := blocking.shared_by(self.pg, x)) is not None:
            memory.reduce(x, largest=True)
        else:
            dist.all_reduce(x, op, group=self.pg)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] on each rank -> [size, ...], in rank order."""
        if torch.compiler.is_compiling() and x.ndim:
            return functional.gathered(x, self.pg).view(self.size, *x.shape)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:])) if x.ndim else x.new_empty((self.size,))
        blocking.all_gather(out, x if x.ndim else x.reshape(1), self.pg)
        return out.view(self.size, *x.shape)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor) -> Any:
        """[n, ...] on each rank -> `out` [size * n, ...]; `x` may be this rank's part of `out`. Returns an async
        work."""
        return blocking.wrapped_all_gather(out, x, group=self.pg, async_op=True)

    def reduce_scatter_into(self, out: torch.Tensor, x: torch.Tensor) -> Any:
        """[size * n] on each rank -> this rank's [n] of the sum, in `out`. Returns an async work."""
        return blocking.wrapped_reduce_scatter(out, x, group=self.pg, async_op=True)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """[size * n, ...] on each rank -> this rank's [n, ...] of the sum."""
        if torch.compiler.is_compiling():
            return functional.scattered_sum(x, self.pg)
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        blocking.reduce_scatter(out, x, self.pg)
        return out

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """[sum(sent)] -> [sum(received)]: flat; `sent` and `received` are numbers of elements by rank."""
        if self.wire is not None:
            return wired_exchange.exchange_by_wire(self.wire, self.rank, x, sent, received)
        out = x.new_empty(sum(received))
        if not torch.compiler.is_compiling() and counts_collectives():
            functional.all_to_all(out, x, received, sent, self.pg)
        elif takes_turns():
            out, work = self.start_all_to_all(x, sent, received)
            try:
                yield_turn()
            finally:
                work.wait()
        else:
            dist.all_to_all_single(out, x, received, sent, group=self.pg)
        return out

    def start_all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> tuple[torch.Tensor, Any]:
        """`all_to_all` of a contiguous tensor: (the result, an async work to wait for before it is read)."""
        out = x.new_empty(sum(received))
        return out, dist.all_to_all_single(out, x, received, sent, group=self.pg, async_op=True)

    def broadcast(self, x: torch.Tensor, source: int) -> None:
        """Overwrite `x` with the tensor of the group's rank `source`."""
        dist.broadcast(x, self.ranks[source], group=self.pg)


def in_groups() -> ModelError:
    """The error of a model that is pickled with its process groups."""
    what = "a parallelized model is pickled, as by torch.save(model); it refers to process groups"
    fix = "state = full_state_dict(model) on every rank, then torch.save(state) on rank 0; or a Checkpointer"
    return ModelError(Problem("model-in-groups", what, fix=fix))


def _backends(pg: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type ("" for any other); a group that was created without a backend has one per device type."""
    backends = {"": str(dist.get_backend(pg))}
    for pair in str(dist.get_backend_config(pg)).split(","):
        device, _, backend = pair.partition(":")
        if backend:
            backends[device.strip()] = backend.strip()
    return backends


GroupOrMesh = DeviceMesh | dist.ProcessGroup


def group_of(group: GroupOrMesh | Group) -> Group:
    """The `Group` of what a user names: a 1-D mesh, such as `mesh["tp"]`, or a process group.

    Raises: MeshError `several-axes` for a mesh of more dims.
    """
    if isinstance(group, Group):
        return group
    if not isinstance(group, DeviceMesh):
        return Group(group)
    if group.ndim != 1:
        what = f"a collective runs over one axis, and the mesh has {group.ndim}: {group.mesh_dim_names}"
        raise MeshError(
            Problem("several-axes", what, fix='name one: mesh["tp"]; several together: axis_group(mesh, "dp", "cp")')
        )
    return Group(group.get_group())


def group_for(ranks: Sequence[int]) -> dist.ProcessGroup:
    """The process group of the given global ranks, created at most once. Call it on every rank in the list.

    Args:
        ranks: global ranks, in the order that they have in the group.

    Returns: an existing group with these ranks and the default backend, else a new one.
    Raises:
        MeshError: `not-in-group` on a rank that is not in the list; `unsorted-group` on torch 2.11, on every rank.
    Cost: at most the creation of one process group, which synchronizes only the ranks in the list.
    """
    members = tuple(ranks)
    if dist.get_rank() not in members:
        raise MeshError(Problem("not-in-group", f"rank {dist.get_rank()} asks for the group of ranks {list(members)}"))
    for group in private_groups.known_groups():
        same_backend = dist.get_backend(group) == dist.get_backend()
        if same_backend and tuple(dist.get_process_group_ranks(group)) == members:
            return group
    if list(members) != sorted(members) and not private_groups.orders_groups():
        what = f"torch {torch.__version__} makes no group of the ranks {list(members)} in this order"
        raise MeshError(
            Problem("unsorted-group", what, fix="order the axes as the mesh does; or use torch 2.12 or newer")
        )
    return private_groups.new_local_group(members, short_name(members))


def first_alike(pg: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group that was made first, of those with the ranks and backends of this one: the same on each of its ranks.

    Equal meshes have groups of their own, and PyTorch's DTensors take those of either mesh.
    """
    ranks, backends = dist.get_process_group_ranks(pg), dist.get_backend_config(pg)
    alike = (
        group
        for group in private_groups.known_groups()
        if dist.get_process_group_ranks(group) == ranks and dist.get_backend_config(group) == backends
    )
    return next(alike, pg)


def axis_group(mesh: DeviceMesh, *axes: str) -> dist.ProcessGroup:
    """This rank's process group along one axis of a mesh, or along several axes together. Call it on every rank of the
    mesh.

    Args:
        mesh: a `DeviceMesh`.
        *axes: names of axes; ranks that differ only in their indices along these axes form a group.

    Returns: the mesh's own group for one axis; else that of `group_for`, ordered by the mesh.
    Cost: at most the creation of one process group.
    """
    if len(axes) == 1:
        return mesh.get_group(axes[0]) if mesh.mesh_dim_names else mesh.get_group()
    spec = mesh_spec(mesh)
    flat = mesh.mesh.flatten().tolist()
    position = flat.index(dist.get_rank())
    return group_for([flat[index] for index in spec.group_of(position, *axes)])


def destroy_groups() -> None:
    """Destroy every process group, and wait until gloo's threads have released their last tensors.

    Call it at the end of a script, instead of `dist.destroy_process_group()`. A thread of gloo needs Python's GIL to
    free a tensor. If the interpreter is shutting down by then, the thread is killed inside a C++ destructor, and the
    process aborts ("terminate called without an active exception") although the run succeeded.

    Cost: 0.1 s; no communication beyond that of `dist.destroy_process_group()`.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(_RELEASE_S)


_RELEASE_S = 0.1
