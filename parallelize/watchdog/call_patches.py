"""What is replaced in this process while a watch is open: methods of process groups, and forwards of this package's
autograd Functions. Nothing is replaced, and nothing costs anything, where no watch is open.

Functional collectives, by which PyTorch redistributes DTensors, call process groups from C++; their Python functions
are replaced too. What compiled code calls is not seen; a rank that waits in it is found by its Python stack.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from parallelize.base.patches import active as patches
from parallelize.base.torch_private.torch_groups import functional_collectives, group_of_functional
from parallelize.comm.shared_memory import SharedMemory
from parallelize.watchdog.call_log import REMEMBERED, CallLog
from parallelize.watchdog.call_places import module_here, place_here

_WITHOUT_MODULES = tuple(
    f"parallelize.ops.{name}" for name in ("collectives", "all_to_all", "attention", "matmul", "vocabulary")
)
"""Rooms and files whose autograd Functions call tensors and groups alone."""

# method to the index of the peer among its arguments, None for collectives; those that a version of torch lacks are
# left out
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
# functional collectives by the method that their group runs
_FUNCTIONAL = {
    "all_reduce": "allreduce",
    "all_gather_tensor": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "all_gather_tensor_autograd": "_allgather_base",
    "all_gather_single_autograd": "_allgather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_tensor_autograd": "_reduce_scatter_base",
    "reduce_scatter_single_autograd": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_to_all_single_autograd": "alltoall_base",
    "broadcast": "broadcast",
}
_MESSAGES = {"send", "recv", "recv_anysource"}
_REDUCES = {name for name in _METHODS if name.startswith(("allreduce", "reduce", "_reduce"))}
_PUBLIC_FUNCTIONS = inspect.unwrap(dist.all_reduce).__code__.co_filename
"""The file of `all_reduce` and its like, by which users reduce: other operations than sums, which alone this package
sends."""

Undo = Callable[[], None]


def record_calls(log: CallLog) -> Undo:
    """Record every call of a process group in the log.

    Returns: what restores everything.
    """
    foreign = [*_replaced_methods(log), *_replaced_functional(log), _replaced_wait()]
    ends = [patches.begin(owner, name, new) for owner, name, new in foreign]
    # shared memory calls no process group
    own = [*_replaced_functions(log), (SharedMemory, "is_allowed", False, SharedMemory.is_allowed)]
    for owner, name, new, _ in own:
        setattr(owner, name, new)

    def undo() -> None:
        for end in reversed(ends):
            end()
        for owner, name, _, old in own:
            setattr(owner, name, old)

    return undo


def _replaced_methods(log: CallLog) -> Iterator[tuple[type, str, Any]]:
    for name in _METHODS:
        if name in vars(dist.ProcessGroup):
            yield dist.ProcessGroup, name, recorded(getattr(dist.ProcessGroup, name), name, log)


def _replaced_functional(log: CallLog) -> Iterator[tuple[Any, str, Any]]:
    functions = functional_collectives()
    for name, op in _FUNCTIONAL.items():
        if original := getattr(functions, name, None):
            yield functions, name, _recorded_functional(original, op, log)


def _recorded_functional(original: Any, op: str, log: CallLog) -> Callable[..., Any]:
    """A functional collective that records its call as one of the method that its group runs."""

    def pending(pg: dist.ProcessGroup, *_: Any) -> Any:
        return (log.by_id.get(id(pg)) or log.group_of(pg)).device_work

    record, form = _recorded_collective(pending, op, log), inspect.signature(original)

    @wraps(original)
    def call(*args: Any, **keywords: Any) -> Any:
        if not torch.compiler.is_compiling():
            arguments = form.bind_partial(*args, **keywords).arguments
            tensor, pg = next(iter(arguments.values()), None), group_of_functional(arguments.get("group"))
            if pg is not None and isinstance(tensor, torch.Tensor):
                record(pg, *((None, tensor) if op in _RESULT_FIRST else (tensor,)))
        return original(*args, **keywords)

    return call


def recorded(original: Any, name: str, log: CallLog) -> Callable[..., Any]:
    """A method of process groups that records its calls, and compares those of collectives that are not expected.

    What runs for each call is written for cold caches, which matmuls leave behind: few objects, no text, no call that
    can be avoided.
    """
    return _recorded_message(original, name, log) if name in _MESSAGES else _recorded_collective(original, name, log)


def _recorded_collective(original: Any, op: str, log: CallLog) -> Callable[..., Any]:
    index, stock_tensor, reduces = int(op in _RESULT_FIRST), torch.Tensor, op in _REDUCES
    names, inside, by_id, orders, thread = log.names, log.inside, log.by_id, log.orders, log.thread

    def call(pg: dist.ProcessGroup, *args: Any, **keywords: Any) -> Any:
        tensor: Any = args[index] if len(args) > index else None
        if type(tensor) is not stock_tensor:
            is_first = type(tensor) is list and len(tensor) > 0 and type(tensor[0]) is stock_tensor
            tensor = tensor[0] if is_first else _first_tensor(tensor)
        group, caller = by_id.get(id(pg)) or log.group_of(pg), get_ident()
        place = inside.get(caller) or place_here(names, 2)
        form = (op, (), "") if tensor is None else (op, tensor.shape, tensor.dtype)
        if reduces and sys._getframe(1).f_code.co_filename == _PUBLIC_FUNCTIONS:
            form = (_op_with_reduction(op, args, keywords), *form[1:])
        number = group.collectives
        record = group.ring[number % REMEMBERED] = number, form, place, None, next(orders)
        group.collectives = number + 1
        if caller == thread:
            log.last_made = group, record
        if group.compares:
            expected = group.history.expected
            if expected is not None and expected.place is place and expected.form == form:
                group.history = expected.history
            else:
                log.unexpected(group, record, tensor)
        work = original(pg, *args, **keywords)
        if tensor is not None and not tensor.is_cpu:
            group.device_work = work
        return work

    return call


def _recorded_message(original: Any, op: str, log: CallLog) -> Callable[..., Any]:
    """Of a message between two ranks, which is counted by itself and not compared."""
    index = _METHODS[op]

    def call(pg: dist.ProcessGroup, *args: Any, **keywords: Any) -> Any:
        tensor = _first_tensor(args[0] if args else None)
        group, caller = log.by_id.get(id(pg)) or log.group_of(pg), get_ident()
        place = log.inside.get(caller) or place_here(log.names, 2)
        form = (op, (), "") if tensor is None else (op, tensor.shape, tensor.dtype)
        number, peer = group.messages, group.ranks[args[index]] if index is not None and len(args) > index else None
        record = group.message_ring[number % REMEMBERED] = number, form, place, peer, next(log.orders)
        group.messages = number + 1
        if caller == log.thread:
            log.last_made = group, record
        work = original(pg, *args, **keywords)
        if tensor is not None and not tensor.is_cpu:
            group.device_work = work
        return work

    return call


def _op_with_reduction(op: str, args: tuple, keywords: dict[str, Any]) -> str:
    """The method with its operation, where that is no sum."""
    options = keywords.get("opts", args[-1] if args else None)
    reduction = getattr(getattr(getattr(options, "reduceOp", None), "op", None), "name", "SUM")
    return op if reduction == "SUM" else f"{op} {reduction.lower()}"


def _first_tensor(argument: Any) -> torch.Tensor | None:
    """A tensor, or the first one of lists of them; None for anything else, such as options."""
    while isinstance(argument, (list, tuple)):
        argument = argument[0] if argument else None
    return argument if isinstance(argument, torch.Tensor) else None


def _replaced_wait() -> tuple[type, str, Any]:
    """`Work.wait`, so that a thread that waits in it has a frame of this file, whoever calls it."""
    original = dist.Work.wait

    def wait(work: Any, *args: Any, **keywords: Any) -> Any:
        return original(work, *args, **keywords)

    return dist.Work, "wait", wait


def _replaced_functions(log: CallLog) -> Iterator[tuple[type, str, Any, Any]]:
    """Forwards of autograd Functions, whose nodes then know the module that applied them, and backwards of those
    without modules."""
    pending = list(Function.__subclasses__())
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        forward, backward = vars(cls).get("forward"), vars(cls).get("backward")
        if not cls.__module__.startswith("parallelize.") or _sets_up(cls):
            continue
        leaf = cls.__module__.startswith(_WITHOUT_MODULES)
        if isinstance(forward, staticmethod):
            yield cls, "forward", staticmethod((_marking_inside if leaf else _marking)(forward.__func__, log)), forward
        if leaf and isinstance(backward, staticmethod):
            yield cls, "backward", staticmethod(_backward_in_place(backward.__func__, log)), backward


def _sets_up(cls: type) -> bool:
    """Whether its forward gets no context."""
    return any("setup_context" in vars(base) for base in cls.__mro__[:-1] if base.__module__.startswith("parallelize."))


def _marking(forward: Callable[..., Any], log: CallLog) -> Callable[..., Any]:
    names = log.names

    def marked(ctx: Any, *args: Any) -> Any:
        places = module_here(names)
        if places is not None:
            ctx._watched_place = places[1]
        return forward(ctx, *args)

    return marked


def _marking_inside(forward: Callable[..., Any], log: CallLog) -> Callable[..., Any]:
    """`_marking`, of a Function that calls no module: its collectives are called where it is applied."""
    names, inside = log.names, log.inside

    def marked(ctx: Any, *args: Any) -> Any:
        places = module_here(names)
        if places is None:
            return forward(ctx, *args)
        thread = get_ident()
        inside[thread], ctx._watched_place = places
        try:
            return forward(ctx, *args)
        finally:
            inside[thread] = None

    return marked


def _backward_in_place(backward: Callable[..., Any], log: CallLog) -> Callable[..., Any]:
    """A backward whose collectives are called at the place where its forward was applied."""
    inside = log.inside

    def placed(ctx: Any, *grads: Any) -> Any:
        thread = get_ident()
        try:
            inside[thread] = ctx._watched_place
        except AttributeError:  # it was applied before the watch was opened, or outside of modules
            inside[thread] = None
        try:
            return backward(ctx, *grads)
        finally:
            inside[thread] = None

    return placed
