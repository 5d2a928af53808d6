"""Messages between stages: tensors that both sides know the form of, and headers where they do not yet.

Point to point on the pipeline's group. On transports that match by order (NCCL) every pair of ranks posts its messages in
the schedule's one order; gloo matches by tag, so that nothing depends on timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallelize.errors import PipelineError, Problem
from parallelize.groups import Group
from parallelize.pipeline.package import Header, Meta

T = torch.Tensor

_FAILED = 0  # the length of a header that says: nothing will come over this boundary in this step
_LEAVES = 256  # tags kept for the tensors of one message


class Pending:
    """Tensors on their way here."""

    def __init__(self, tensors: list[T], works: list[Any], peer: int):
        self.tensors, self.works, self.peer = tensors, works, peer

    def wait(self) -> list[T]:
        """The tensors. Raises: PipelineError `peer-lost` naming the rank that was waited for."""
        for work in self.works:
            finish(work, self.peer)
        self.works = []
        return self.tensors


class Transport:
    """What one rank sends and receives in one step.

    Args:
        group: of the pipeline. device: where tensors lie.
    """

    def __init__(self, group: Group, device: torch.device):
        self.group, self.device = group, device
        self.by_tag = group.backend(device) == "gloo"
        self._sending: list[tuple[Any, T, int]] = []

    def send(self, tensors: Sequence[T], peer: int, tag: int) -> None:
        """Begin to send; the tensors are kept until they have gone."""
        if len(tensors) > _LEAVES:
            what = f"a stage passes on {len(tensors)} tensors, at most {_LEAVES} travel"
            raise PipelineError(Problem("too-many-tensors", what, fix="pass fewer, larger tensors"))
        self._sending = [sent for sent in self._sending if not sent[0].is_completed()]
        for place, tensor in enumerate(tensors):
            tensor = tensor.detach().contiguous()
            work = dist.isend(tensor, self.group.ranks[peer], group=self.group.pg, tag=tag * _LEAVES + place)
            self._sending.append((work, tensor, peer))

    def receive(self, metas: Sequence[Meta], peer: int, tag: int) -> Pending:
        """Begin to receive tensors of a known form."""
        tensors, works = [], []
        for place, meta in enumerate(metas):
            tensor = meta.empty(self.device)
            tensors.append(tensor)
            works.append(dist.irecv(tensor, self.group.ranks[peer], group=self.group.pg, tag=tag * _LEAVES + place))
        return Pending(tensors, works, peer)

    def send_header(self, header: Header | None, peer: int, tag: int) -> None:
        """None: this stage has failed before it knew what it would send."""
        raw = torch.empty(0, dtype=torch.uint8) if header is None else header.to_bytes()
        size = torch.tensor([raw.numel() if header is not None else _FAILED], device=self.device)
        self.send([size] if header is None else [size, raw.to(self.device)], peer, tag)

    def receive_header(self, peer: int, tag: int) -> Header | None:
        """Waits. None where the sender has failed."""
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._receive_now(size, peer, tag * _LEAVES)
        if int(size) == _FAILED:
            return None
        raw = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self._receive_now(raw, peer, tag * _LEAVES + 1)
        return Header.from_bytes(raw)

    def _receive_now(self, tensor: T, peer: int, tag: int) -> None:
        finish(dist.irecv(tensor, self.group.ranks[peer], group=self.group.pg, tag=tag), peer)

    def drain(self) -> None:
        """Wait until all that was sent has gone."""
        for work, _, peer in self._sending:
            finish(work, peer)
        self._sending = []


def finish(work: Any, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise lost(peer, error) from error


def lost(peer: int, error: BaseException) -> PipelineError:
    """A neighbour that does not answer: dead, stopped, or ended by an error of its own."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    what = f"rank {peer} of the pipeline does not answer: {text}"
    return PipelineError(Problem("peer-lost", what, fix="look at that rank's own output; start again on all ranks"))
