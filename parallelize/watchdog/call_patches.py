"""What is replaced in this process while a watch is open: methods of process groups, and forwards of this package's autograd
Functions. Nothing is replaced, and nothing costs anything, where no watch is open.

What calls a process group from C++ alone (functional collectives: DTensors that PyTorch redistributes, compiled code) is not
seen; a rank that waits in it is found by its Python stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from parallelize.comm.shared_memory import SharedMemory
from parallelize.watchdog.call_log import CallLog, CollectiveCall, GroupCalls
from parallelize.watchdog.call_places import PLACE, place_here

# method to the index of the peer among its arguments, None for collectives; those that a version of torch lacks are left out
_METHODS: dict[str, int | None] = {
    "allreduce": None,
    "allreduce_coalesced": None,
    "allgather": None,
    "allgather_coalesced": None,
    "allgather_into_tensor_coalesced": None,
    "_allgather_base": None,
    "all_gather_single": None,
    "all_gather_single_coalesced": None,
    "reduce_scatter": None,
    "reduce_scatter_single": None,
    "reduce_scatter_single_coalesced": None,
    "reduce_scatter_tensor_coalesced": None,
    "_reduce_scatter_base": None,
    "alltoall": None,
    "alltoall_base": None,
    "all_to_all_single": None,
    "broadcast": None,
    "reduce": None,
    "gather": None,
    "scatter": None,
    "barrier": None,
    "send": 1,
    "recv": 1,
    "recv_anysource": None,
}
# of these the second argument is what this rank gives; their first one is the result
_RESULT_FIRST = {
    name for name in _METHODS if name.startswith(("_all", "all_", "_reduce_scatter", "reduce_scatter"))
} | {
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "gather",
}

Check = Callable[[GroupCalls, CollectiveCall, torch.device], None]
Undo = Callable[[], None]


def record_calls(log: CallLog, check: Check) -> Undo:
    """Record every call of a process group in the log. check: is called before each collective of a group that compares.

    Returns: what restores everything.
    """
    replaced = [*_replaced_methods(log, check), *_replaced_wait(), *_replaced_forwards(log)]
    replaced.append((SharedMemory, "is_allowed", False, SharedMemory.is_allowed))  # it calls no process group
    for owner, name, new, _ in replaced:
        setattr(owner, name, new)

    def undo() -> None:
        for owner, name, _, old in replaced:
            setattr(owner, name, old)

    return undo


def _replaced_methods(log: CallLog, check: Check) -> Iterator[tuple[type, str, Any, Any]]:
    for name, peer in _METHODS.items():
        if name in vars(dist.ProcessGroup):
            stock = vars(dist.ProcessGroup)[name]  # as it is bound; `getattr` gives the function inside
            yield dist.ProcessGroup, name, recorded(getattr(dist.ProcessGroup, name), name, peer, log, check), stock


def recorded(original: Any, name: str, peer: int | None, log: CallLog, check: Check) -> Callable[..., Any]:
    """A method of process groups that records and checks its calls. peer: the index of the other rank among its arguments."""
    index = 1 if name in _RESULT_FIRST else 0

    def call(pg: dist.ProcessGroup, *args: Any, **keywords: Any) -> Any:
        tensor = args[index] if len(args) > index else None
        while isinstance(tensor, (list, tuple)):
            tensor = tensor[0] if tensor else None
        to = args[peer] if peer is not None and len(args) > peer else None
        group, made = log.add(pg, name, tensor, to)
        if group.compares and to is None and name != "recv_anysource":
            check(group, made, tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu"))
        work = original(pg, *args, **keywords)
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
            group.device_work = work
        return work

    return call


def _replaced_wait() -> Iterator[tuple[type, str, Any, Any]]:
    """`Work.wait`, so that a thread that waits in it has a frame of this file, whoever calls it."""
    original = dist.Work.wait

    def wait(work: Any, *args: Any, **keywords: Any) -> Any:
        return original(work, *args, **keywords)

    yield dist.Work, "wait", wait, vars(dist.Work)["wait"]


def _replaced_forwards(log: CallLog) -> Iterator[tuple[type, str, Any, Any]]:
    """Forwards of autograd Functions, whose nodes then know the module that applied them."""
    pending = list(Function.__subclasses__())
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        own = vars(cls).get("forward")
        if cls.__module__.startswith("parallelize.") and isinstance(own, staticmethod) and not _sets_up(cls):
            yield cls, "forward", staticmethod(_marking(own.__func__, log)), own


def _sets_up(cls: type) -> bool:
    """Whether its forward gets no context."""
    return any("setup_context" in vars(base) for base in cls.__mro__[:-1] if base.__module__.startswith("parallelize."))


def _marking(forward: Callable[..., Any], log: CallLog) -> Callable[..., Any]:
    def marked(ctx: Any, *args: Any) -> Any:
        place = place_here(log.names)
        if place.module and place.phase != "backward":
            setattr(ctx, PLACE, place.module)
        return forward(ctx, *args)

    return marked
