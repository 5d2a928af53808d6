"""Signals that ask a run to stop: the first is a request, which the loop reads at a step boundary; a second one ends at
once.

The C-level handler of Python writes the signal's number to a pipe. A thread reads it, so that a second signal ends a
process whose main thread waits in a collective for ever. An end at any moment leaves the last published checkpoint as
it is.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from parallelize.base.errors import CheckpointError, Problem

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SAME_REQUEST_S = 2.0
"""Signals within this time are one request: a launcher forwards what the terminal has sent to the ranks too."""


class StopSignals:
    """Requests to stop this process. Build it in the main thread.

    Args:
        signals: which signals are requests.

    Attributes:
        received: the name of the first signal; "" before. at_s: when it came, by `time.monotonic`.

    Raises: CheckpointError `not-main-thread`.
    """

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS):
        if threading.current_thread() is not threading.main_thread():
            fix = "call stop_on_signals before threads are started, in the thread that runs the script"
            raise CheckpointError(Problem("not-main-thread", "only the main thread can handle signals", fix=fix))
        self.received, self.at_s = "", 0.0
        self._numbers = {int(number) for number in signals}
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._earlier: dict[int, Any] = {number: signal.signal(number, _noted) for number in self._numbers}
        self._earlier_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while data := os.read(self._read, 64):
            for number in data:
                if number in self._numbers:
                    self.receive(number)
        os.close(self._read)

    def receive(self, number: int) -> None:
        """Note a signal; end the process if it is the second request."""
        now = time.monotonic()
        if not self.received:
            self.at_s, self.received = now, signal.Signals(number).name
        elif now - self.at_s > SAME_REQUEST_S:
            os.write(
                2, f"{signal.Signals(number).name} again: this rank ends now; the last checkpoint is intact\n".encode()
            )
            os._exit(128 + number)

    def close(self) -> None:
        """Restore the handlers that were there before. May be called twice."""
        if self._write < 0:
            return
        signal.set_wakeup_fd(self._earlier_fd)
        for number, handler in self._earlier.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(self._write)  # ends the thread
        self._write = -1
        self._thread.join()


def _noted(number: int, frame: Any) -> None:
    """A Python handler, without which the number is not written to the pipe."""
