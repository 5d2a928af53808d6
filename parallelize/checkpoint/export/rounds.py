"""Before each bucket all ranks say that they go on, and one that has stopped says so without waiting for the others.

    rank goes on   posts its arrival, and waits until all ranks have arrived or one has stopped
    rank stops     posts that it has stopped, and waits for nobody

Messages go through the store of the process group, because a rank may stop at any time: in an exception, in a `break`,
in the garbage collector. A collective there would wait for ranks that are elsewhere. A rank enters the exchange of a
bucket only after all ranks have arrived, so no rank waits in it for one that does not come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parallelize.base.errors import CheckpointError, Problem, short_list
from parallelize.base.torch_private import torch_groups as private_groups

_SLICE_S = 0.5
"""A wait for the store locks it against other threads, such as the watchdog of NCCL, so that it is split into short
ones."""
GO, STOP = "go", "stop"


class Rounds:
    """The rounds of one export: one a bucket, and one after the last.

    Args:
        key: distinguishes exports; the same on every rank.
        ranks: the global ranks that take part. rank: the index of this one.
        timeout_s: how long to wait for a rank that neither arrives nor stops.
    """

    def __init__(self, key: str, ranks: Sequence[int], rank: int, timeout_s: float):
        self._prefix, self._ranks, self._rank, self._timeout_s = f"parallelize/export/{key}", ranks, rank, timeout_s
        self._store: Any = private_groups.default_store() if len(ranks) > 1 else None
        self._number = 0  # of the next round
        self.ended = self._store is None

    def go_on(self) -> None:
        """Wait until every rank goes on to the next round.

        Raises: CheckpointError `export-stopped` if a rank has stopped instead, with its reason; `rank-lost` if one does
            neither in time, with its number.
        """
        if self.ended:
            return
        number, self._number = self._number, self._number + 1
        if self._store.add(self._key("arrived", number), 1) == len(self._ranks):
            self._decide(number, GO)
            if number:  # all ranks have read the verdict of the last round, as they have arrived in this one
                self._forget(number - 1)
        self._store.set(self._key("last", self._ranks[self._rank]), str(number))
        verdict = self._verdict(number)
        if verdict != GO:
            self.leave()
            raise _stopped(verdict)

    def stop(self, reason: str) -> None:
        """Say that this rank takes part in no further round. Waits for nobody, and raises nothing."""
        if self.ended:
            return
        try:
            self._decide(self._number, f"{STOP} {self._ranks[self._rank]} {reason}")
        except (RuntimeError, ValueError, dist.DistError):
            self.ended = True  # the process group was destroyed: no rank waits any more
        self.leave()

    def leave(self) -> None:
        """After the last round, on every rank. The last rank that leaves removes what is still in the store."""
        if self.ended:
            return
        self.ended = True
        with suppress(RuntimeError, ValueError, dist.DistError):  # the process group was destroyed
            if self._store.add(self._key("left"), 1) == len(self._ranks):
                for number in range(max(0, self._number - 2), self._number + 1):
                    self._forget(number)
                for rank in self._ranks:
                    self._store.delete_key(self._key("last", rank))
                self._store.delete_key(self._key("left"))

    def _key(self, *parts: Any) -> str:
        return "/".join([self._prefix, *map(str, parts)])

    def _decide(self, number: int, verdict: str) -> str:
        """The verdict of a round: the first that is posted."""
        return _text(self._store.compare_set(self._key("verdict", number), "", verdict))

    def _verdict(self, number: int) -> str:
        key, deadline = self._key("verdict", number), time.monotonic() + self._timeout_s
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                self._store.wait([key], timedelta(seconds=max(0.001, min(_SLICE_S, remaining))))
                return _text(self._store.get(key))
            except dist.DistStoreError:
                continue
            except RuntimeError as error:  # stores differ in the class of a timeout
                if "imeout" not in str(error) and "imed out" not in str(error):
                    raise
        silent = [rank for rank in self._ranks if not self._has_arrived(rank, number)]
        verdict = self._decide(number, f"{STOP} {self._ranks[self._rank]} waited for a rank")
        if verdict == GO:
            return verdict
        self.leave()
        raise _lost(silent, self._timeout_s)

    def _has_arrived(self, rank: int, number: int) -> bool:
        key = self._key("last", rank)
        return self._store.check([key]) and int(_text(self._store.get(key))) >= number

    def _forget(self, number: int) -> None:
        for kind in ("arrived", "verdict"):
            self._store.delete_key(self._key(kind, number))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _stopped(verdict: str) -> CheckpointError:
    _, rank, reason = verdict.split(" ", 2)
    what = f"rank {rank} has stopped before the last bucket: {reason}"
    fix = (
        "the tensors so far are right, and later ones were not sent: export again, or stop on every rank after the "
        "same bucket"
    )
    return CheckpointError(Problem("export-stopped", what, fix=fix))


def _lost(silent: Sequence[int], timeout_s: float) -> CheckpointError:
    ranks = short_list([str(rank) for rank in silent], 8) or "unknown"
    what = f"ranks that have asked for no further bucket in {timeout_s:g} s: {ranks}"
    fix = (
        "iterate on every rank to the end, or close() the export where a rank stops; raise timeout_s for a slow "
        "consumer"
    )
    return CheckpointError(Problem("rank-lost", what, fix=fix))
