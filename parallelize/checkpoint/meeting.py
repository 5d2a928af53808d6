"""How the ranks of a save or load agree: small texts, over a process group of their own.

Their own, because a save goes on in a background thread beside training's collectives. Tensors never travel here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize.checkpoint.memory import bytes_of
from parallelize.checkpoint.strict_json import read_json, write_json
from parallelize.errors import CheckpointError, ParallelizeError, Problem

TIMEOUT_S = 1800.0
_SHORT_BYTES = 4096


class Meeting:
    """Ranks that save and load together. All calls are collectives: the same ones in the same order on every rank.

    Args:
        mesh: whose ranks take part; None: all processes, or this one alone where there are no others.
        beside: other collectives may go on meanwhile, so that a process group of its own is needed. False: the default
            group serves, where it is gloo's and has the same ranks.
    """

    def __init__(self, mesh: DeviceMesh | None = None, timeout_s: float = TIMEOUT_S, *, beside: bool = True):
        self.ranks: list[int] = [0]
        self.group: Any = None
        self._borrowed = self.lost = False
        if dist.is_available() and dist.is_initialized():
            self.ranks = mesh.mesh.flatten().tolist() if mesh is not None else list(range(dist.get_world_size()))
            everyone = self.ranks == list(range(dist.get_world_size()))
            self._borrowed = everyone and not beside and dist.get_backend() == "gloo"
            if self._borrowed:
                self.group = dist.group.WORLD
            elif len(self.ranks) > 1:
                self.group = dist.new_group(
                    self.ranks,
                    backend="gloo",
                    timeout=timedelta(seconds=timeout_s),
                    use_local_synchronization=not everyone,
                )
            if len(self.ranks) == 1:
                self.group = None
        self.rank = self.ranks.index(dist.get_rank()) if self.group is not None else 0
        self.size = len(self.ranks)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, on the first rank; None on the others. Values are plain, as JSON has them."""
        if self.group is None and not self.lost:
            return [value]
        mine = _packed(value)
        with self._named("gather"):
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([mine.numel()]), group=self.group)
            longest = int(max(map(int, sizes)))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: mine.numel()] = mine
            found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)] if self.leads else None
            dist.gather(padded, found, dst=self.ranks[0], group=self.group)
        return [_unpacked(one[: int(n)]) for one, n in zip(found, sizes, strict=True)] if found is not None else None

    def share(self, value: Any = None) -> Any:
        """The first rank's value, on every rank."""
        if self.group is None and not self.lost:
            return value
        with self._named("share"):
            mine = _packed(value) if self.leads else torch.empty(0, dtype=torch.uint8)
            size = torch.tensor([mine.numel()])
            dist.broadcast(size, self.ranks[0], group=self.group)
            if not self.leads:
                mine = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(mine, self.ranks[0], group=self.group)
        return _unpacked(mine)

    def all(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank: in one message where all are short, as they mostly are."""
        if self.group is None and not self.lost:
            return [value]
        mine = _packed(value)
        with self._named("all"):
            padded = torch.zeros(_SHORT_BYTES, dtype=torch.uint8)
            padded[:8] = torch.tensor([mine.numel()]).view(torch.uint8)
            if mine.numel() <= _SHORT_BYTES - 8:
                padded[8 : 8 + mine.numel()] = mine
            found = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(found, padded, group=self.group)
        sizes = [int(one[:8].view(torch.int64)) for one in found]
        if max(sizes) > _SHORT_BYTES - 8:
            return self.share(self.gather(value))
        return [_unpacked(one[8 : 8 + size]) for one, size in zip(found, sizes, strict=True)]

    def agree(self, error: ParallelizeError | None, value: Any = None) -> list[Any]:
        """Go on only where no rank has an error; then every rank's value.

        Raises: this rank's own; or CheckpointError with those of the others.
        """
        answers = self.all([told(error) if error is not None else None, value])
        if error is not None:
            raise error
        failed = [rank for rank, (found, _) in enumerate(answers) if found]
        if failed:
            raise CheckpointError(*(restored(p, self.ranks[rank]) for rank in failed[:4] for p in answers[rank][0][:4]))
        return [given for _, given in answers]

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """gloo's errors name sockets; this says what was going on. The group ends with the first of them, so that ranks which
        have not seen it do not wait for those which have. Raises: CheckpointError `rank-lost`."""
        if self.lost:
            raise CheckpointError(Problem("rank-lost", "a rank did not answer before", fix="start the run again"))
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self.lost = True
            self.close()
            said = str(error).splitlines()[0][:200]
            lost = f"a rank did not answer while a checkpoint was being agreed on ({what}): {said}"
            fix = "look at the other ranks' errors; what was saved before is as it was"
            raise CheckpointError(Problem("rank-lost", lost, fix=fix)) from error

    def close(self) -> None:
        """Give the process group back. A collective of nobody: each rank for itself."""
        group, self.group = self.group, None
        if group is not None and not self._borrowed and dist.is_initialized():
            dist.destroy_process_group(group)


def told(error: ParallelizeError) -> list[Any]:
    """An error's problems, as they travel."""
    return [[p.slug, p.what, p.where, [list(row) for row in p.rows], p.fix] for p in error.problems]


def known(error: Exception) -> ParallelizeError:
    """An error as one of this package, so that other ranks can be told of it."""
    if isinstance(error, ParallelizeError):
        return error
    found = CheckpointError(Problem("failed", f"{type(error).__name__}: {str(error)[:300]}"))
    found.__cause__ = error
    return found


def restored(given: list[Any], rank: int) -> Problem:
    """A problem that another rank has found."""
    slug, what, where, rows, fix = given
    return Problem(slug, what, where, (("on", f"rank {rank}"), *((str(a), str(b)) for a, b in rows)), fix)


def _packed(value: Any) -> torch.Tensor:
    text = write_json(value)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return read_json(bytes(bytes_of(data)), "another rank's message")
