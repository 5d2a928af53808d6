"""The dispatcher library of this package, and how to define an op that takes a process group.

An op's arguments cannot contain a group, so they contain its `Group.key`; kernels take the `Group` itself.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.base.torch_private import torch_tensors as private
from parallelize.comm.groups import Group

NAMESPACE = "parallelize"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

Kernel = Callable[..., Any]
KERNELS: dict[str, GroupKernel] = {}
_EVERY_DEVICE = "CompositeExplicitAutograd"


def define(schema: str) -> Callable[[Kernel], Kernel]:
    """Define an op by its schema; the decorated function is its kernel on every device and for simulated ranks."""
    name, _, arguments = schema.partition("(")
    position = [text.split()[1] for text in arguments.partition(")")[0].split(", ")].index("group")
    LIBRARY.define(schema)

    def kernel(function: Kernel) -> Kernel:
        group_kernel = KERNELS[name] = GroupKernel(function, position)
        LIBRARY.impl(name, lambda *args: group_kernel.run(args), _EVERY_DEVICE)
        simulate(f"{NAMESPACE}::{name}", LIBRARY, group_kernel)
        return function

    return kernel


def fake(name: str) -> Callable[[Callable], Callable]:
    """Register the decorated function as the op's kernel on tensors without values."""
    return torch.library.register_fake(f"{NAMESPACE}::{name}", lib=LIBRARY)


# -- simulation ------------------------------------------------------------------------------------------------------
# The ops under PyTorch's `LocalTensorMode`: all ranks in one process, with their real kernels. That mode runs an
# unknown op once per rank, and a collective inside it would silently see one rank only. So each op has a rule: its
# kernel runs for every rank of a group in a thread of its own, and messages pass through queues in memory. Numbers,
# order of sums and messages are those of real ranks, because the code is the same.


T = torch.Tensor
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class GroupKernel:
    """A kernel that takes a `Group` for the argument at `position`, where its op takes the group's key."""

    function: Callable[..., Any]
    position: int

    def group(self, args: tuple) -> Group:
        return Group.by_key(args[self.position])

    def with_group(self, args: tuple, group: Group | None = None) -> tuple:
        """The op's arguments with a group (by default, the one that they name) instead of its key."""
        group = self.group(args) if group is None else group
        return (*args[: self.position], group, *args[self.position + 1 :])

    def run(self, args: tuple, group: Group | None = None) -> Any:
        return self.function(*self.with_group(args, group))


class _SimulatedMessages:
    """Messages between simulated ranks: a queue for each (source, target, tag)."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int, int], queue.SimpleQueue] = defaultdict(queue.SimpleQueue)
        self.lock = threading.Lock()

    def queue(self, source: int, target: int, tag: int) -> queue.SimpleQueue:
        with self.lock:
            return self.queues[source, target, tag]

    def wire(self, rank: int, send: Mapping[int, T], receive: Mapping[int, T], tag: int) -> list[Any]:
        """Send and receive as `rank`; see `comm.groups.Wire`."""
        for peer, x in send.items():
            self.queue(rank, peer, tag).put(x.clone())
        return [_PendingReceive(self.queue(peer, rank, tag), x) for peer, x in receive.items()]


class _PendingReceive:
    def __init__(self, source: queue.SimpleQueue, target: T):
        self.source, self.target = source, target

    def wait(self) -> None:
        self.target.copy_(self.source.get(timeout=_TIMEOUT_S))


def _run(kernel: GroupKernel, mode: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """Run one op for every rank: (mode, op, types, args) as `register_torch_dispatch` passes them."""
    if any(isinstance(value, DTensor) for value in private.tree_leaves(args)):
        return NotImplemented  # the op's rule for DTensors comes first, and calls the op again on local tensors
    group = kernel.group(args)
    results: dict[int, Any] = {}
    for ranks in private_groups.simulated_groups(group.pg):
        messages = _SimulatedMessages()
        jobs = [
            partial(_run_rank, kernel, args, group.simulated(n, partial(messages.wire, n)), rank, results)
            for n, rank in enumerate(ranks)
        ]
        if group.traffic is not None and group.ranks[group.rank] in ranks:
            jobs[group.rank] = partial(_recorded, jobs[group.rank], group)
        threads = [threading.Thread(target=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TIMEOUT_S)
    errors = [result for result in results.values() if isinstance(result, BaseException)]
    if errors:
        raise errors[0]
    first = next(iter(results.values()))
    if isinstance(first, T):
        return private_groups.local_tensor({rank: results[rank] for rank in sorted(results)})
    return [
        private_groups.local_tensor({rank: results[rank][n] for rank in sorted(results)}) for n in range(len(first))
    ]


def _recorded(job: Any, group: Group) -> None:
    """Record on the real group what its own rank would have sent."""
    job.args[2].traffic = group.traffic
    job()


def _run_rank(kernel: GroupKernel, args: tuple, group: Group, rank: int, results: dict[int, Any]) -> None:
    try:
        rank_args = private.tree_map(lambda x: private_groups.on_rank(x, rank), args)
        with torch.no_grad():
            results[rank] = kernel.run(rank_args, group)
    except BaseException as error:  # raised by the caller
        results[rank] = error


def simulate(op: str, library: Any, kernel: GroupKernel) -> None:
    """Register an op's rule under `LocalTensorMode`. Does nothing if torch does not have that mode."""
    if private_groups.LocalTensorMode is not None:
        torch.library.register_torch_dispatch(op, private_groups.LocalTensorMode, partial(_run, kernel), lib=library)
