"""Whether all ranks stop at this step boundary: agreed on by one small asynchronous reduction a step, on a group of its own.

At each boundary a rank starts a maximum over a few numbers and reads that of the boundary before, which is complete by then: nothing
waits. Where steps are longer than `WAITS_ABOVE_S` the reduction of the same boundary is waited for, which costs less than a
thousandth of the step, and a signal is answered one step earlier. Which of the two follows from reduced numbers, so that all
ranks do the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.errors import CheckpointError, Problem
from parallelize.checkpoint.run.rank_sync import RankSync

WAITS_ABOVE_S = 0.25


class StopAgreement:
    """The ranks' requests to stop. `stops` is a collective.

    Args:
        mesh: the mesh of all processes; None: all of them.
        timeout_s: how long ranks wait for each other.
        extras: how many more numbers are reduced.

    Attributes:
        largest: of each extra number, the largest over all ranks at the last boundary that was read.
    """

    def __init__(self, mesh: DeviceMesh | None, timeout_s: float, extras: int = 0):
        self._sync = RankSync(mesh, timeout_s)
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._before_s = time.monotonic()
        self._longest_s = 0.0
        self.largest = [0.0] * extras

    def stops(self, requested: bool, extras: Sequence[float] = ()) -> bool:
        """Whether some rank has asked to stop. The same on every rank.

        Args:
            requested: by this rank.
            extras: numbers of this rank.

        Raises: CheckpointError `rank-lost`.
        Cost: one all_reduce of a few numbers, which is not waited for where steps are short.
        """
        now = time.monotonic()
        local = torch.tensor([float(requested), now - self._before_s, *extras], dtype=torch.float64)
        self._before_s = now
        if self._sync.size == 1:
            return self._read(local)
        stopping = False
        try:
            if self._pending is not None:
                stopping = self._wait(*self._pending)
            self._pending = (local, dist.all_reduce(local, dist.ReduceOp.MAX, group=self._sync.group, async_op=True))
            if not stopping and self._longest_s > WAITS_ABOVE_S:
                pending, self._pending = self._pending, None
                stopping = self._wait(*pending)
        except RuntimeError as error:
            what = f"a rank did not answer at a step boundary: {str(error).splitlines()[0][:200]}"
            raise CheckpointError(Problem("rank-lost", what, fix="look at the other ranks' errors")) from error
        return stopping

    def _wait(self, reduced: torch.Tensor, work: Any) -> bool:
        work.wait()
        return self._read(reduced)

    def _read(self, reduced: torch.Tensor) -> bool:
        requested, self._longest_s, *self.largest = reduced.tolist()
        return requested > 0

    def close(self) -> None:
        """Wait for the last reduction, which all ranks have started, and destroy the group."""
        if self._pending is not None:
            with suppress(RuntimeError):  # a rank is gone, which whoever closes knows
                self._pending[1].wait()
            self._pending = None
        self._sync.close()
