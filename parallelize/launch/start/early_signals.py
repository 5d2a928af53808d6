"""Signals that come before a rank can save: while it imports, waits for other ranks, or builds the model. Nothing is
lost then, so the process ends at once with the status that asks for another start, instead of by the signal. The loop's
own signals take over later."""

from __future__ import annotations

import os
import signal

from parallelize.base.terminal.console import REQUEUE
from parallelize.checkpoint.run.stop_signals import StopSignals


class EarlySignals(StopSignals):
    """Requests to stop this process before its first step. Later `StopSignals` hide it for as long as they are open."""

    def receive(self, number: int) -> None:
        """End the process, also where its main thread waits in C++ code."""
        name = signal.Signals(number).name
        os.write(2, f"{name}: stopped before the first step; nothing is lost, start it again\n".encode())
        os._exit(REQUEUE)
