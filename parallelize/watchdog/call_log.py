"""The collectives that this rank has called, by process group: what, where in the model, and the how manieth of the
group.

The numbers are counted on each rank by itself. They agree, because ranks of a group call the same collectives in the
same order from `watch` on; where they do not, that is what the watch is to find.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallelize.base.errors import short_list
from parallelize.comm.mesh_view import MeshView
from parallelize.state.records import mesh_of
from parallelize.watchdog.call_places import CallPlace, ModuleNames

# -- call history ----------------------------------------------------------------------------------------------------
# What a group is expected to call next: what followed on its last two calls the last time. Each pair of calls is one
# `CallHistory`, which refers to the expected call, and that one to the next pair: a call that repeats costs a few
# comparisons, and no lookup.


_MOST_HISTORIES = 20_000
Form = tuple[str, Any, Any]
"""Of a call: its method, and shape and dtype of its first tensor."""


class CallHistory:
    """The last two calls of a group.

    Attributes:
        last: what was compared of the last call. expected: what followed the last time, None where nothing has yet.
        known: all histories of the group, by what was compared of the two calls.
    """

    __slots__ = ("expected", "known", "last")

    def __init__(self, last: Any = None, known: dict[Any, CallHistory] | None = None):
        self.last = last
        self.expected: ExpectedCall | None = None
        self.known: dict[Any, CallHistory] = {} if known is None else known

    def learn(self, form: Form, place: Any, compared: tuple[Any, ...]) -> CallHistory:
        """Expect this call from now on. Returns: the history with it."""
        if len(self.known) > _MOST_HISTORIES:
            self.known.clear()
        history = self.known.get((self.last, compared))
        if history is None:
            history = self.known[self.last, compared] = CallHistory(compared, self.known)
        self.expected = ExpectedCall(form, place, compared, history)
        return history


class ExpectedCall:
    """A call, and the history that it leads to. By its form and place the very same call is known without making what
    is compared of it."""

    __slots__ = ("compared", "form", "history", "place")

    def __init__(self, form: Form, place: Any, compared: tuple[Any, ...], history: CallHistory):
        self.form, self.place = form, place
        self.compared, self.history = compared, history


# -- call log ------------------------------------------------------------------------------------------


REMEMBERED = 64
"""Calls that are remembered of each group."""
UNEVEN = {"alltoall_base", "all_to_all_single", "alltoall", "scatter"}
"""Collectives whose tensors differ in size between ranks."""
Record = tuple[int, Form, CallPlace, int | None, int]
"""(number, form, place, peer, order): a `CollectiveCall`, as it is stored."""
Compare = Callable[["GroupCalls", "CollectiveCall", torch.Tensor | None], None]


class CollectiveCall(NamedTuple):
    """One call of a process group.

    Attributes:
        number: 0 for the first one of its group. peer: the other global rank of a message, or None.
        shape, dtype: of the first tensor. order: how many calls of any group this process had made before.
    """

    number: int
    op: str
    shape: tuple[int, ...]
    dtype: Any
    place: CallPlace
    peer: int | None
    order: int

    @classmethod
    def of(cls, record: Record) -> CollectiveCall:
        number, (op, shape, dtype), place, peer, order = record
        return cls(number, op, shape, dtype, place, peer, order)

    @property
    def compared(self) -> tuple[Any, ...]:
        """What must be the same on every rank of the group."""
        place = self.place
        shape = () if self.op in UNEVEN else self.shape
        return self.op, shape, self.dtype, place.module, place.phase if place.module else ""

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
            "order": self.order,
        }


class GroupCalls:
    """The calls of one process group. Calls are stored as plain tuples in a ring, and become `CollectiveCall`s when
    they are read.

    Attributes:
        key: the group's name, the same on all its ranks. ranks: its global ranks.
        compares: whether a call with another shape must be found before it is made: gloo aborts the process of another
            rank.
        collectives, messages: how many were called. Messages between two ranks are counted by themselves.
        ring, message_ring: the last ones, each at its number modulo `REMEMBERED`.
        history: what is expected to be called next (see `call_gate`).
        device_work: of the last collective of a backend that works on a device, for which the host does not wait.
    """

    __slots__ = (
        "collectives",
        "compares",
        "device_work",
        "history",
        "key",
        "message_ring",
        "messages",
        "ranks",
        "ring",
    )

    def __init__(self, pg: dist.ProcessGroup):
        self.key = str(pg.group_name)
        self.ranks = list(dist.get_process_group_ranks(pg))
        self.compares = len(self.ranks) > 1 and "gloo" in str(dist.get_backend_config(pg))
        self.collectives = self.messages = 0
        self.ring: list[Record | None] = [None] * REMEMBERED
        self.message_ring: list[Record | None] = [None] * REMEMBERED
        self.history = CallHistory()
        self.device_work: Any = None

    @property
    def recent(self) -> list[CollectiveCall]:
        """The last collectives, newest last."""
        return _calls_in_order(self.ring)

    @property
    def recent_messages(self) -> list[CollectiveCall]:
        """The last messages, newest last."""
        return _calls_in_order(self.message_ring)

    @property
    def is_pending(self) -> bool:
        """Whether the last collective was given to a device, which has not finished it."""
        work = self.device_work
        if work is not None and work.is_completed():
            self.device_work = None  # it refers to tensors
        return self.device_work is not None

    def find(self, number: int) -> CollectiveCall | None:
        """The collective with this number, if it was called and is remembered."""
        record = self.ring[number % REMEMBERED]
        return CollectiveCall.of(record) if record is not None and record[0] == number else None


def _calls_in_order(ring: list[Record | None]) -> list[CollectiveCall]:
    return [CollectiveCall.of(record) for record in sorted(filter(None, ring.copy()), key=itemgetter(0))]


@dataclass
class CallLog:
    """All calls of this process since the watch began. `call_patches.recorded` adds them.

    Attributes:
        compare: is called before a collective of a group that compares, where it is not the expected one.
        thread: the thread that opened the watch, whose calls others wait for; a save in the background has threads and
            groups of its own.
        last_made: the group and record of the last call of that thread. orders: 0, 1, 2, ... for the calls of all
            groups.
        inside: thread to the place of the autograd Function of this package that runs in it (see `call_patches`).
        by_id: the calls of a group, by the id of the object that stands for it.
        mesh: by which groups are named, besides the meshes of the models.
    """

    names: ModuleNames = field(default_factory=ModuleNames)
    groups: dict[str, GroupCalls] = field(default_factory=dict)
    mesh: MeshView | None = None
    compare: Compare | None = None
    thread: int = field(default_factory=threading.get_ident)
    last_made: tuple[GroupCalls, Record] | None = None
    orders: Iterator[int] = field(default_factory=itertools.count)
    inside: dict[int, CallPlace | None] = field(default_factory=dict)
    by_id: dict[int, GroupCalls] = field(default_factory=dict)
    _references: dict[int, Any] = field(default_factory=dict)

    @property
    def last(self) -> tuple[GroupCalls, CollectiveCall] | None:
        """The last call of the thread that opened the watch."""
        last = self.last_made
        return None if last is None else (last[0], CollectiveCall.of(last[1]))

    @property
    def count(self) -> int:
        """All calls, as a sign of progress."""
        return sum(group.collectives + group.messages for group in list(self.groups.values()))

    def unexpected(self, group: GroupCalls, record: Record, tensor: torch.Tensor | None) -> None:
        """A collective that is not the very one that was expected. Raises: what `compare` raises."""
        if self.compare is not None:
            self.compare(group, CollectiveCall.of(record), tensor)

    def group_of(self, pg: dist.ProcessGroup) -> GroupCalls:
        """The calls of a group that is seen for the first time, or by another object."""
        group = self.groups.setdefault(pg.group_name, GroupCalls(pg))
        key = id(pg)
        self.by_id[key] = group
        self._references[key] = weakref.ref(pg, lambda _: self.by_id.pop(key, None))  # another object may get this id
        return group

    def axis_of(self, group: GroupCalls) -> str:
        """The axes of the mesh that a group is over, with its ranks; of a group that is over no axes, its ranks."""
        meshes = [self.mesh, *(mesh_of(root) for root in self.names.roots)]
        names = ("+".join(mesh.axes_along(group.ranks)) for mesh in meshes if mesh is not None)
        ranks = f"ranks {short_list(list(map(str, group.ranks)), 8)}"
        name = next(filter(None, names), "")
        return f"{name} ({ranks})" if name else ranks
