"""A run that stops on a signal: the request, the agreement of all ranks, and whether a save fits into the grace period."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from parallelize.base.terminal.console import FINE, REQUEUE
from parallelize.checkpoint.run.stop_agreement import StopAgreement
from parallelize.checkpoint.run.stop_signals import SIGNALS, StopSignals

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
        mesh: DeviceMesh | None,
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
        """What the log is warned of: a save that takes longer than the grace period; "" where it fits, or is known already."""
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
