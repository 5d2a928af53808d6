"""Signals of the launcher, passed on to the ranks that it has started. Linux finds them by /proc, other systems by `ps`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_EVERY_S = 0.2


class Forwarding:
    """While it is open, the signals in `FORWARDED` go to the children of this process, also to those that start later.

    Ranks know SIGTERM, SIGUSR1 and SIGINT; SIGHUP is passed on as SIGTERM.

    Attributes:
        received: the names of the signals so far.
    """

    def __init__(self) -> None:
        self.received: list[str] = []
        self._sent: dict[int, int] = {}  # child to how many signals it has got
        self._numbers: list[int] = []
        self._earlier: dict[int, Any] = {}
        self._done = threading.Event()

    def __enter__(self) -> Forwarding:
        self._earlier = {number: signal.signal(number, self._receive) for number in FORWARDED}
        threading.Thread(target=self._forward, name="signals to ranks", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        self.received.append(signal.Signals(number).name)
        self._numbers.append(signal.SIGTERM if number == signal.SIGHUP else number)

    def _forward(self) -> None:
        while not self._done.wait(_EVERY_S):
            if not self._numbers:
                continue
            for child in children():
                for number in self._numbers[self._sent.get(child, 0) :]:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(child, number)
                self._sent[child] = len(self._numbers)


def children() -> list[int]:
    """The process ids of this process's children."""
    if sys.platform == "linux":
        return list(_children_by_proc())
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False, timeout=20
    ).stdout
    pairs = [line.split() for line in listed.splitlines()]
    return [int(pid) for pid, parent in pairs if int(parent) == os.getpid()]


def _children_by_proc() -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == os.getpid() and after_name[0] != "Z":
                    yield int(folder.name)


def wait_for_end(seconds: float) -> None:
    """Wait until all children have ended, at most so long."""
    deadline = time.monotonic() + seconds
    while children() and time.monotonic() < deadline:
        time.sleep(_EVERY_S)
