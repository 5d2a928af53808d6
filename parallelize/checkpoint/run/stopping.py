"""A run that stops on a signal: the request, the agreement of all ranks, and whether a save fits into the grace
period."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.terminal.console import FINE, REQUEUE
from parallelize.checkpoint.run.rank_sync import RankSync
from parallelize.checkpoint.run.stop_signals import SIGNALS, StopSignals
from parallelize.comm.mesh_view import MeshView

_log = logging.getLogger("parallelize")


class Stopping:
    """Requests to stop, agreed on at step boundaries. Built and called on every rank.

    Args:
        mesh: the mesh of all processes; None: all of them.
        grace_s: seconds between the signal and the kill that follows it.
        timeout_s: how long ranks wait for each other.
        extras: how many numbers are reduced with the request: see `StopAgreement`.
        signals: which signals are requests.

    Attributes:
        agreed: all ranks stop. signals, agreement: the parts.
    """

    def __init__(
        self,
        mesh: MeshView | None,
        grace_s: float,
        timeout_s: float,
        extras: int = 0,
        signals: Sequence[Any] = SIGNALS,
    ):
        self.grace_s, self.agreed = grace_s, False
        self.signals = StopSignals(signals)
        self._warned_s = 0.0
        try:
            self.agreement = StopAgreement(mesh, timeout_s, extras)
        except BaseException:
            self.signals.close()
            raise

    def stops(self, extras: Sequence[float] = ()) -> bool:
        """Whether all ranks stop at this step boundary. Cost: as `StopAgreement.stops`."""
        if not self.agreed:
            self.agreed = self.agreement.stops(bool(self.signals.received), extras)
        return self.agreed

    def compare(self, save_s: float, how: str) -> str:
        """What the log is warned of: a save that takes longer than the grace period; "" where it fits, or is known
        already."""
        if save_s <= self.grace_s or save_s <= 1.2 * self._warned_s:
            return ""
        self._warned_s = save_s
        text = (
            f"a save takes about {save_s:.0f} s ({how}), and a signal leaves {self.grace_s:.0f} s: "
            "give more time (`--signal=USR1@SECONDS` of SLURM, terminationGracePeriodSeconds), or save more often"
        )
        _log.warning(text)
        return text

    @property
    def exit_status(self) -> int:
        """What the script should end with: 0, or `REQUEUE` (75) where a signal has stopped it."""
        return REQUEUE if self.agreed else FINE

    @property
    def since_s(self) -> float:
        """Seconds since the signal."""
        return time.monotonic() - self.signals.at_s if self.signals.received else 0.0

    def close(self) -> None:
        """Restore the handlers of signals."""
        self.signals.close()
        self.agreement.close()


# -- stop agreement --------------------------------------------------------------------------------------------------
# Whether all ranks stop at this step boundary: agreed on by one small asynchronous reduction a step, on a group of
# its own. At each boundary a rank starts a maximum over a few numbers and reads that of the boundary before, which is
# complete by then: nothing waits. Where steps are longer than `WAITS_ABOVE_S` the reduction of the same boundary is
# waited for, which costs less than a thousandth of the step, and a signal is answered one step earlier. Which of the
# two follows from reduced numbers, so that all ranks do the same.


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

    def __init__(self, mesh: MeshView | None, timeout_s: float, extras: int = 0):
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
