"""The messages of the ranks of a save or load: short JSON texts, over a separate process group.

The group is separate because a background save runs while training uses other collectives. Bytes of tensors are sent
only by `swap`, for ranks that read files of other nodes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelize.base.agreement import problem_from_json, problems_to_json
from parallelize.base.errors import CheckpointError, ParallelizeError, Problem
from parallelize.base.files.strict_json import read_json, write_json
from parallelize.base.mesh import short_name
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.checkpoint.format.device_pieces import bytes_of
from parallelize.comm.mesh_view import MeshView

TIMEOUT_S = 1800.0
_SHORT_BYTES = 4096
_LENGTH_BYTES = 8


class RankSync:
    """Ranks that save and load together. All calls are collectives: the same ones in the same order on every rank.

    Args:
        mesh: the mesh whose ranks take part. None: all processes, or this one alone if there are no others.
        timeout_s: how long ranks wait for each other.
        own_group: make a process group, because other collectives may run at the same time. False: use the default
            group if it is gloo's and has the same ranks.
    """

    def __init__(self, mesh: MeshView | None = None, timeout_s: float = TIMEOUT_S, *, own_group: bool = True):
        self.ranks: list[int] = [0]
        self.group: Any = None
        self._borrowed = self.lost = False
        if dist.is_available() and dist.is_initialized():
            world = list(range(dist.get_world_size()))
            self.ranks = mesh.ranks if mesh is not None else world
            if len(self.ranks) > 1:
                self._borrowed = self.ranks == world and not own_group and dist.get_backend() == "gloo"
                timeout = timedelta(seconds=timeout_s)
                self.group = (
                    dist.group.WORLD
                    if self._borrowed
                    else private_groups.new_local_group(
                        self.ranks, short_name(self.ranks), own=True, timeout=timeout, backend="gloo"
                    )
                )
        self.rank = self.ranks.index(dist.get_rank()) if self.group is not None else 0
        self.size = len(self.ranks)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the first rank, which does what only one rank may do."""
        return self.rank == 0

    def gather(self, value: Any) -> Sequence[Any] | None:
        """Every rank's value on the first rank; None on the others. Values are plain, as in JSON; each is decoded when
        it is read, because together they may need gigabytes."""
        if self.group is None and not self.lost:
            return [value]
        message = _packed(value)
        with self._reporting_lost_ranks("gather"):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([message.numel()]), group=self.group)
            longest = int(max(map(int, sizes)))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: message.numel()] = message
            messages = None
            if self.is_coordinator:
                messages = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.gather(padded, messages, dst=self.ranks[0], group=self.group)
        if messages is None:
            return None
        return _Messages([message[: int(size)] for message, size in zip(messages, sizes, strict=True)])

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        """The value of one rank, by default the first, on every rank. `source`: its index in `ranks`."""
        if self.group is None and not self.lost:
            return value
        with self._reporting_lost_ranks("broadcast"):
            message = _packed(value) if self.rank == source else torch.empty(0, dtype=torch.uint8)
            size = torch.tensor([message.numel()])
            dist.broadcast(size, self.ranks[source], group=self.group)
            if self.rank != source:
                message = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(message, self.ranks[source], group=self.group)
        return _unpacked(message)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank: in one collective where all messages are short, which is the usual case,
        else in two."""
        if self.group is None and not self.lost:
            return [value]
        message = _packed(value)
        with self._reporting_lost_ranks("all_gather"):
            padded = torch.zeros(_SHORT_BYTES, dtype=torch.uint8)
            padded[:_LENGTH_BYTES] = torch.tensor([message.numel()]).view(torch.uint8)
            if message.numel() <= _SHORT_BYTES - _LENGTH_BYTES:
                padded[_LENGTH_BYTES : _LENGTH_BYTES + message.numel()] = message
            messages = self._gathered(padded)
            sizes = [int(message[:_LENGTH_BYTES].view(torch.int64)) for message in messages]
            first = _LENGTH_BYTES
            if max(sizes) > _SHORT_BYTES - _LENGTH_BYTES:
                padded = torch.zeros(max(sizes), dtype=torch.uint8)
                padded[: message.numel()] = message
                messages, first = self._gathered(padded), 0
        return [_unpacked(message[first : first + size]) for message, size in zip(messages, sizes, strict=True)]

    def _gathered(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The messages of all ranks, which have one size."""
        messages = [torch.empty_like(message) for _ in range(self.size)]
        dist.all_gather(messages, message, group=self.group)
        return messages

    def exchange(self, messages: Mapping[int, Any]) -> dict[int, Any]:
        """Send values to some ranks, and receive those that were sent to this rank. Ranks are indices in `ranks`, not
        this one."""
        packed = {to: _packed(value) for to, value in messages.items()}
        sizes = self.all_gather([[to, message.numel()] for to, message in packed.items()])
        expected = {source: size for source, row in enumerate(sizes) for to, size in row if to == self.rank}
        received = {source: torch.empty(size, dtype=torch.uint8) for source, size in expected.items()}
        self.swap(packed, received)
        return {source: _unpacked(message) for source, message in received.items()}

    def swap(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Send a tensor of bytes to each of some ranks, and fill one from each of some. Both sides know the sizes."""
        if not outgoing and not incoming:
            return
        with self._reporting_lost_ranks("transfer"):
            posted = [dist.irecv(room, self.ranks[source], group=self.group) for source, room in incoming.items()]
            posted += [dist.isend(data, self.ranks[to], group=self.group) for to, data in outgoing.items()]
            for work in posted:
                if work is not None:
                    work.wait()

    def agree(self, error: ParallelizeError | None, value: Any = None) -> list[Any]:
        """Return every rank's value if no rank has an error.

        Raises: this rank's error; or CheckpointError with those of the others.
        """
        answers = self.all_gather([problems_to_json(error.problems) if error is not None else None, value])
        if error is not None:
            raise error
        failed = [(rank, problems) for rank, (problems, _) in zip(self.ranks, answers, strict=False) if problems]
        if failed:
            raise CheckpointError(*(problem_from_json(p, rank) for rank, problems in failed[:4] for p in problems[:4]))
        return [value for _, value in answers]

    @contextmanager
    def _reporting_lost_ranks(self, collective: str) -> Iterator[None]:
        """Convert errors of gloo, which name sockets, to errors that name the call. The group is closed at the first
        error, so that ranks without an error do not wait for those with one.

        Raises: CheckpointError `rank-lost`.
        """
        if self.lost:
            raise CheckpointError(Problem("rank-lost", "a rank did not answer before", fix="start the run again"))
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self.lost = True
            self.close()
            reason = str(error).splitlines()[0][:200]
            what = f"a rank did not answer during the {collective} of a save or load: {reason}"
            fix = "look at the other ranks' errors; earlier checkpoints are unchanged"
            raise CheckpointError(Problem("rank-lost", what, fix=fix)) from error

    def close(self) -> None:
        """Destroy the process group, if it is this object's own. Not a collective."""
        group, self.group = self.group, None
        if group is not None and not self._borrowed and dist.is_initialized():
            dist.destroy_process_group(group)


def as_parallelize_error(error: Exception) -> ParallelizeError:
    """An error as one of this package, so that it can be sent to other ranks."""
    if isinstance(error, ParallelizeError):
        return error
    converted = CheckpointError(Problem("failed", f"{type(error).__name__}: {str(error)[:300]}"))
    converted.__cause__ = error
    return converted


class _Messages(Sequence[Any]):
    """Values that are decoded when they are read."""

    def __init__(self, messages: list[torch.Tensor]):
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, index: Any) -> Any:
        return _unpacked(self._messages[index])


_ZLIB = 0x78
"""The first byte of what zlib wrote, with which no JSON begins."""


def _packed(value: Any) -> torch.Tensor:
    text = write_json(value)
    if len(text) > _SHORT_BYTES:
        text = zlib.compress(text, 1)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    text = bytes(bytes_of(data))
    return read_json(zlib.decompress(text) if text[0] == _ZLIB else text, "another rank's message")
