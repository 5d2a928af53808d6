"""The collectives that this rank has called, by process group: what, where in the model, and the how manieth of the group.

The numbers are counted on each rank by itself. They agree, because ranks of a group call the same collectives in the same order
from `watch` on; where they do not, that is what the watch is to find.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize.applied.records import mesh_of
from parallelize.comm.groups import mesh_spec
from parallelize.errors import short_list
from parallelize.watchdog.call_places import CallPlace, ModuleNames, place_here

REMEMBERED = 64
"""Calls that are remembered of each group."""
UNEVEN = {"alltoall_base", "all_to_all_single", "alltoall", "scatter"}
"""Collectives whose tensors differ in size between ranks."""
POINT_TO_POINT = {"send", "recv", "recv_anysource"}


class CollectiveCall(NamedTuple):
    """One call of a process group.

    Attributes:
        number: 0 for the first one of its group. peer: the other global rank of a message, or None.
        shape, dtype: of the first tensor. at: seconds of the monotonic clock.
        compared: what must be the same on every rank of the group.
        previous: what was compared of the two calls before it, by which this one is predicted.
    """

    number: int
    op: str
    shape: tuple[int, ...]
    dtype: Any
    place: CallPlace
    peer: int | None
    at: float
    compared: Any = None
    previous: Any = None

    def as_data(self) -> dict[str, Any]:
        """As it is sent and written."""
        place = self.place
        return {
            "number": self.number,
            "op": self.op.strip("_"),
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "module": place.module,
            "phase": place.phase,
            "function": place.function,
            "peer": self.peer,
            "ago_s": round(time.monotonic() - self.at, 3),
        }


class GroupCalls:
    """The calls of one process group.

    Attributes:
        key: the group's name, the same on all its ranks. ranks: its global ranks.
        compares: whether a call with another shape must be found before it is made: gloo aborts the process of another rank.
        collectives, messages: how many were called. Messages between two ranks are counted by themselves.
        recent: the last collectives, newest last. recent_messages: the last messages.
        successors: the call that came last after each two calls (see `call_gate`).
        last_two: what is compared of the last two collectives, newest first.
        device_work: of the last collective of a backend that works on a device, for which the host does not wait.
    """

    def __init__(self, pg: dist.ProcessGroup):
        self.key = str(pg.group_name)
        self.ranks = list(dist.get_process_group_ranks(pg))
        self.compares = len(self.ranks) > 1 and "gloo" in str(dist.get_backend_config(pg))
        self.collectives = self.messages = 0
        self.recent: deque[CollectiveCall] = deque(maxlen=REMEMBERED)
        self.recent_messages: deque[CollectiveCall] = deque(maxlen=REMEMBERED)
        self.successors: dict[Any, Any] = {}
        self.device_work: Any = None
        self.last_two: tuple[Any, Any] = (None, None)

    @property
    def is_pending(self) -> bool:
        """Whether the last collective was given to a device, which has not finished it."""
        work = self.device_work
        if work is not None and work.is_completed():
            self.device_work = None  # it refers to tensors
        return self.device_work is not None

    def find(self, number: int) -> CollectiveCall | None:
        """The collective with this number, if it was called and is remembered."""
        calls = list(self.recent)
        index = number - calls[0].number if calls else -1
        return calls[index] if 0 <= index < len(calls) else None


@dataclass
class CallLog:
    """All calls of this process since the watch began.

    Attributes:
        count: all of them, as a sign of progress. thread: the thread that opened the watch, whose calls others wait for; a save in the
            background has threads and groups of its own.
        mesh: by which groups are named, besides the meshes of the models. last: the last call of that thread.
    """

    names: ModuleNames = field(default_factory=ModuleNames)
    groups: dict[str, GroupCalls] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    count: int = 0
    thread: int = field(default_factory=threading.get_ident)
    last: tuple[GroupCalls, CollectiveCall] | None = None
    _by_id: dict[int, tuple[Any, GroupCalls]] = field(default_factory=dict)

    def add(self, pg: dist.ProcessGroup, op: str, tensor: Any, peer: int | None) -> tuple[GroupCalls, CollectiveCall]:
        """Record a call that is about to be made; depth-sensitive: called by the function that replaces the group's method."""
        known = self._by_id.get(id(pg))
        group = known[1] if known is not None and known[0]() is pg else self._group(pg)
        place = place_here(self.names, 3)
        shape, dtype = (tensor.shape, tensor.dtype) if isinstance(tensor, torch.Tensor) else ((), "")
        self.count += 1
        if peer is not None or op in POINT_TO_POINT:
            peer = group.ranks[peer] if peer is not None else None
            call = CollectiveCall(group.messages, op, shape, dtype, place, peer, time.monotonic())
            group.messages += 1
            group.recent_messages.append(call)
        else:
            compared = (op, () if op in UNEVEN else shape, dtype, place.module, place.phase if place.module else "")
            call = CollectiveCall(
                group.collectives, op, shape, dtype, place, None, time.monotonic(), compared, group.last_two
            )
            group.last_two = compared, group.last_two[0]
            group.collectives += 1
            group.recent.append(call)
        if threading.get_ident() == self.thread:
            self.last = group, call
        return group, call

    def _group(self, pg: dist.ProcessGroup) -> GroupCalls:
        """The calls of a group that is seen for the first time, or by another object."""
        group = self.groups.setdefault(pg.group_name, GroupCalls(pg))
        self._by_id[id(pg)] = weakref.ref(pg), group
        return group

    def axis_of(self, group: GroupCalls) -> str:
        """The axes of the mesh that a group is over, with its ranks; of a group that is over no axes, its ranks."""
        meshes = [self.mesh, *(mesh_of(root) for root in self.names.roots)]
        names = (axes_of(mesh, group.ranks) for mesh in meshes if mesh is not None)
        ranks = f"ranks {short_list(list(map(str, group.ranks)), 8)}"
        name = next(filter(None, names), "")
        return f"{name} ({ranks})" if name else ranks


def axes_of(mesh: DeviceMesh, ranks: list[int]) -> str:
    """The fewest axes of a mesh along which these ranks lie, such as "dp+tp"; "" where there are none."""
    spec, flat = mesh_spec(mesh), mesh.mesh.flatten().tolist()
    if not set(ranks) <= set(flat):
        return ""
    position = flat.index(ranks[0])
    names = [name for name in spec.names if spec.ranks(name) > 1]
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            if sorted(flat[index] for index in spec.group_of(position, *axes)) == sorted(ranks):
                return "+".join(axes)
    return ""
