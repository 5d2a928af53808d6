"""The ops under PyTorch's `LocalTensorMode`: all ranks in one process, with their real kernels.

That mode runs an unknown op once a rank, and a collective inside would silently see one rank only. So each op has a rule:
its kernel runs for every rank of a group in a thread of its own, and messages pass through queues in memory. Numbers,
order of sums and messages are those of real ranks, because the code is.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallelize import _torch_private as private
from parallelize.groups import Group
from parallelize.ops import linears, ring_attention, ulysses  # noqa: F401  their ops get a rule each
from parallelize.ops.library import KERNELS, LIBRARY, NAMESPACE, group_key, with_group

T = torch.Tensor
_TIMEOUT_S = 60.0


class _Mail:
    """Messages between simulated ranks: (from, to, tag) to a queue."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], queue.SimpleQueue] = defaultdict(queue.SimpleQueue)
        self.lock = threading.Lock()

    def box(self, source: int, target: int, tag: int) -> queue.SimpleQueue:
        with self.lock:
            return self.boxes[source, target, tag]

    def wire(self, me: int, send: Mapping[int, T], receive: Mapping[int, T], tag: int) -> list[Any]:
        for peer, x in send.items():
            self.box(me, peer, tag).put(x.clone())
        return [_Letter(self.box(peer, me, tag), x) for peer, x in receive.items()]


class _Letter:
    def __init__(self, box: queue.SimpleQueue, target: T):
        self.box, self.target = box, target

    def wait(self) -> None:
        self.target.copy_(self.box.get(timeout=_TIMEOUT_S))


def _run(name: str, mode: Any, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
    """One op for every rank: (mode, op, types, args) as `register_torch_dispatch` gives them."""
    if any(isinstance(value, DTensor) for value in private.tree_leaves(args)):
        return NotImplemented  # its own rule comes first, and calls the op again on local tensors
    group = Group.by_key(group_key(name, args))
    results: dict[int, Any] = {}
    for ranks in private.simulated_groups(group.pg):
        mail = _Mail()
        jobs = [
            partial(_one_rank, name, args, group.simulated(place, partial(mail.wire, place)), rank, results)
            for place, rank in enumerate(ranks)
        ]
        if group.traffic is not None and group.ranks[group.rank] in ranks:
            jobs[group.rank] = partial(_recorded, jobs[group.rank], group)
        threads = [threading.Thread(target=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TIMEOUT_S)
    failed = [result for result in results.values() if isinstance(result, BaseException)]
    if failed:
        raise failed[0]
    first = next(iter(results.values()))
    if isinstance(first, T):
        return private.local_tensor({rank: results[rank] for rank in sorted(results)})
    return [private.local_tensor({rank: results[rank][n] for rank in sorted(results)}) for n in range(len(first))]


def _recorded(job: Any, group: Group) -> None:
    """The real group records what its own rank would have sent."""
    job.args[2].traffic = group.traffic
    job()


def _one_rank(name: str, args: tuple, group: Group, rank: int, results: dict[int, Any]) -> None:
    try:
        own = private.tree_map(lambda x: private.on_rank(x, rank), args)
        with torch.no_grad():
            results[rank] = KERNELS[name](*with_group(name, own, group))
    except BaseException as error:  # raised by the caller
        results[rank] = error


if private.LocalTensorMode is not None:
    for _name in KERNELS:
        torch.library.register_torch_dispatch(
            f"{NAMESPACE}::{_name}", private.LocalTensorMode, partial(_run, _name), lib=LIBRARY
        )
