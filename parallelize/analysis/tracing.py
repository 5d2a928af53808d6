"""Runs one microbatch of a planned model on tensors without values, and writes down what it does.

Every op passes a dispatch mode: storages are followed from their making to their end, collectives are answered at once and
counted with the mesh axis of their group, and work is counted from shapes. The code that runs is that of training.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallelize import _torch_private as private
from parallelize.analysis.records import LOSS, OUTSIDE, Message
from parallelize.analysis.scopes import Scopes
from parallelize.analysis.work import kernel_of
from parallelize.groups import Group
from parallelize.mesh import MeshSpec
from parallelize.ops.library import KERNELS, NAMESPACE, group_key, with_group

T = torch.Tensor

# dispatcher op -> (our word, which argument's bytes count, what it returns)
COLLECTIVES = {
    "allreduce_": ("all_reduce", 0, "tensors"),
    "broadcast_": ("broadcast", 0, "tensors"),
    "_allgather_base_": ("all_gather", 0, "tensor"),
    "_reduce_scatter_base_": ("reduce_scatter", 1, "tensor"),
    "alltoall_base_": ("all_to_all", 1, "work"),
    "send": ("send", 0, "work"),
    "recv_": ("recv", 0, "work"),
}


@dataclass
class Event:
    """One moment: a storage comes (bytes > 0) or goes, a message, or work."""

    unit: str
    storage: int = 0
    bytes: int = 0
    message: Message | None = None
    work: Any = None
    late: bool = False  # it goes when the action has ended


class Axes:
    """The mesh axis that a group of ranks lies along."""

    def __init__(self, spec: MeshSpec, rank: int):
        self.spec, self.rank = spec, rank
        self._known: dict[tuple[int, ...], str] = {}
        names = [name for name, size in spec.axes if size > 1]
        for axis in names:
            self._known.setdefault(spec.group_of(rank, axis), axis)
        for first in range(len(names)):
            for stop in range(len(names), first + 1, -1):
                self._known.setdefault(spec.group_of(rank, *names[first:stop]), "*".join(names[first:stop]))
        if len(names) > 1:
            self._known[tuple(range(spec.world_size))] = "world"

    def name(self, ranks: Sequence[int]) -> str:
        """A part of an axis (sharers of a key/value head) counts as that axis."""
        ranks = tuple(ranks)
        if ranks in self._known:
            return self._known[ranks]
        inside = [axis for known, axis in self._known.items() if set(ranks) <= set(known)]
        return inside[0] if inside else "world"


class Tracer(private.DispatchMode):
    """Writes events into the current list of `actions`.

    Args:
        unit_of: module name -> unit, or None. axes: see `Axes`.
    """

    def __init__(self, scopes: Scopes, unit_of: Callable[[str], str | None], axes: Axes):
        super().__init__()
        self.scopes, self.unit_of, self.axes = scopes, unit_of, axes
        self.events: list[Event] = []
        self._held: dict[int, int] = {}  # storage -> serial number, while it lives
        self._serial = 0
        self._makers: dict[int, str] = {}  # storage -> the unit that has made it
        self._affirmed = 0  # the storage of the last `all(...)`
        self._units: dict[str | None, str] = {None: LOSS}
        self._last = OUTSIDE
        self._phase = "forward"

    def begin(self, phase: str) -> list[Event]:
        """Another action begins; returns its list of events, which fills meanwhile."""
        self.events, self._phase = [], phase
        return self.events

    def serial_of(self, x: T) -> int | None:
        """The number under which a tensor's storage was written down."""
        return self._held.get(private.storage_address(x))

    # -- ops ------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" and func.__name__.split(".")[0] in COLLECTIVES:
            return self._collective(func, args, kwargs)
        if func.namespace == NAMESPACE:
            return self._own_op(func, args)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._answer(args[0])
        output = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.all:
            self._affirmed = private.storage_address(output)
        unit = self._unit()
        for leaf in private.tree_leaves(output):
            if isinstance(leaf, T):
                self._hold(leaf, unit)
        work = kernel_of(func, args, kwargs, output)
        if work is not None:
            self.events.append(Event(unit, work=work))
        return output

    def _answer(self, x: T) -> Any:
        """What a forward is told that asks for a value: zero, but "yes" to whether something holds everywhere (no position is
        masked, no sequence is packed)."""
        if private.storage_address(x) == self._affirmed:
            return True
        return False if x.dtype == torch.bool else 0.0 if x.dtype.is_floating_point else 0

    def _collective(self, func: Any, args: tuple, kwargs: dict) -> Any:
        op, counted, returned = COLLECTIVES[func.__name__.split(".")[0]]
        ranks = private.ranks_of_op(args)
        size = sum(x.numel() * x.element_size() for x in private.tree_leaves(args[counted]) if isinstance(x, T))
        unit, module = self._unit(), self.scopes.now
        message = Message(op, self.axes.name(ranks), len(ranks), size, module or "", self._phase)
        self.events.append(Event(unit, message=message))
        work = private.finished_work()
        return work if returned == "work" else (args[0], work)

    def _own_op(self, func: Any, args: tuple) -> Any:
        """An op with a collective inside: its kernel runs in sight, and what it exchanges from rank to rank is counted."""
        name = func._schema.name.partition("::")[2]
        group = Group.by_key(group_key(name, args))
        with group.recording() as sent, self:
            output = KERNELS[name](*with_group(name, args, group))
        unit, module, axis = self._unit(), self.scopes.now or "", self.axes.name(group.ranks)
        for _, size in sent:
            message = Message("send", axis, 2, size, module, self._phase)
            self.events.append(Event(unit, message=message))
        return output

    def _unit(self) -> str:
        """The unit that is running; between units in backward the one before goes on."""
        module = self.scopes.now
        if module is None and self._phase == "backward":
            return self._last if private.running_node() is not None or self._last != OUTSIDE else LOSS
        if module not in self._units:
            self._units[module] = self.unit_of(module) or OUTSIDE if module is not None else LOSS
        unit = self._units[module]
        if unit == OUTSIDE and self._phase == "backward":
            return self._last
        self._last = unit
        return unit

    # -- storages -------------------------------------------------------------------------------------------------

    def _hold(self, x: T, unit: str) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._held or not size:
            return
        self._serial += 1
        self._held[key] = serial = self._serial
        self._makers[serial] = unit
        self.events.append(Event(unit, serial, size))
        weakref.finalize(storage, self._let_go, key, serial, size)

    def _let_go(self, key: int, serial: int, size: int) -> None:
        if self._held.get(key) == serial:
            del self._held[key]
            # what goes when nothing runs any more (outputs, the loss) goes on the stage that has made it
            idle = self._phase == "backward" and self.scopes.now is None and private.running_node() is None
            maker = self._makers.pop(serial, OUTSIDE)
            late = idle and maker != OUTSIDE
            self.events.append(Event(maker if late else self._unit(), serial, -size, late=late))

    def known(self, tensors: Sequence[T]) -> None:
        """Storages that were there before: parameters and inputs. They are not counted."""
        for x in tensors:
            self._held.setdefault(private.storage_address(x), 0)
