"""Point-to-point messages between the ranks of a group, many in flight at once: the transport of every overlapped op.

An `Exchange` is a list of steps. In each step a rank sends one tensor to each peer that it names, and receives one
tensor from each. Steps are posted without waiting, and waited for one by one. The transport depends on the group's
backend:

    gloo, mpi, ucc   send and receive, one message per peer (a sixth of the latency of gloo's collectives, measured)
    nccl, xccl       one coalesced batch of sends and receives per step, on the group's own stream; `wait` makes the current
                     stream wait for an event and does not block the host
    fake             nothing is sent
    any other        one list all-to-all per step

Leaving the `with` block waits for everything that was posted, also after an error, so that no message of this exchange
can be matched with a message of the next one.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from parallelize.comm.groups import Group

T = torch.Tensor
TAG = 0x7061  # keeps these messages apart from those of pipeline stages on the same group

_POINT_TO_POINT = ("gloo", "mpi", "ucc")
_BATCHED = ("nccl", "xccl")


class Step:
    """One posted step. It references its tensors until they have been sent and received."""

    __slots__ = ("received", "sent", "tensors")

    def __init__(self, received: list[Any], sent: list[Any], tensors: Any):
        self.received, self.sent, self.tensors = received, sent, tensors

    def wait(self) -> None:
        """Wait until this rank has received everything in the step.

        Raises: RuntimeError if a peer died, or sent nothing within the group's timeout.
        """
        for work in self.received:
            work.wait()
        self.received = []


class Exchange:
    """The messages of one op, as a context manager."""

    def __init__(self, group: Group):
        self.group = group
        self._steps: list[Step] = []

    def __enter__(self) -> Exchange:
        return self

    def post(self, send: Mapping[int, T], receive: Mapping[int, T], stream: int = 0, record: bool = True) -> Step:
        """Start one step.

        Args:
            send, receive: contiguous tensors by the peer's rank in the group; empty tensors are skipped on both sides.
            stream: steps of one stream are matched in the order in which they are posted; streams are independent.
            record: whether the step belongs in a recording of the group's traffic.
        """
        send = {peer: x for peer, x in send.items() if x.numel()}
        receive = {peer: x for peer, x in receive.items() if x.numel()}
        if record and self.group.traffic is not None:
            self.group.traffic.append(("exchange", sum(x.numel() * x.element_size() for x in send.values())))
        step = _post(self.group, send, receive, TAG + stream)
        self._steps.append(step)
        return step

    def finish(self, step: Step) -> None:
        """Wait until a step is both sent and received, and release its tensors. Raises: as `Step.wait`."""
        step.wait()
        for work in step.sent:
            work.wait()
        self._steps.remove(step)

    def finish_all(self) -> None:
        """Wait for every posted step. Raises: RuntimeError, the first one after all steps have been waited for."""
        failure = self.drain()
        if failure is not None:
            raise failure

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        failure = self.drain()
        if failure is not None and error is None:
            raise failure

    def drain(self) -> RuntimeError | None:
        """Wait for every posted step, and return the first error instead of raising it."""
        failure = None
        for step in self._steps:
            works, step.received, step.sent = step.received + step.sent, [], []
            for work in works:
                try:
                    work.wait()
                except RuntimeError as error:
                    failure = failure or error
        return failure


def _post(group: Group, send: dict[int, T], receive: dict[int, T], tag: int) -> Step:
    if group.wire is not None:
        return Step(group.wire(send, receive, tag), [], (send, receive))
    pg: Any = group.pg
    like = next(iter((*send.values(), *receive.values())), None)
    backend = group.backend(torch.device("cpu") if like is None else like.device)
    if backend in _POINT_TO_POINT:
        sent = [pg.send([x], peer, tag) for peer, x in send.items()]
        return Step([pg.recv([x], peer, tag) for peer, x in receive.items()], sent, (send, receive))
    if backend == "fake":
        return Step([], [], None)
    if backend in _BATCHED:
        if not (send or receive):
            return Step([], [], None)
        ops = [dist.P2POp(dist.isend, x, group=pg, group_peer=peer) for peer, x in send.items()]
        ops += [dist.P2POp(dist.irecv, x, group=pg, group_peer=peer) for peer, x in receive.items()]
        return Step(list(dist.batch_isend_irecv(ops)), [], (send, receive))
    return _all_to_all(group, send, receive, like)


def _all_to_all(group: Group, send: dict[int, T], receive: dict[int, T], like: T | None) -> Step:
    """Every rank must make this call in every step, also a rank without messages."""
    empty = torch.empty(0) if like is None else like.new_empty(0)
    outputs = [receive.get(peer, empty) for peer in range(group.size)]
    inputs = [send.get(peer, empty) for peer in range(group.size)]
    work = dist.all_to_all(outputs, inputs, group=group.pg, async_op=True)
    return Step([work] if work is not None else [], [], (outputs, inputs))
