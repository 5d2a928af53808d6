"""A line that tells how far a long read or write has come: on a terminal, and nowhere else. Torch-free."""

from __future__ import annotations

import sys
import time
from typing import Any

_EVERY_S = 0.2


class Progress:
    """Counts bytes. `total` may be unknown; `shown`: False on ranks that keep quiet.

    with Progress("loading", total=n) as progress: progress(num_bytes)
    """

    def __init__(self, what: str, shown: bool = True, total: int = 0, stream: Any = None):
        self.what, self.total, self.done = what, total, 0
        self.stream = stream if stream is not None else sys.stderr
        self.shown = shown and bool(getattr(self.stream, "isatty", lambda: False)())
        self._began = self._last = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        self.done += num_bytes
        now = time.monotonic()
        if self.shown and now - self._last >= _EVERY_S:
            self._last = now
            self._draw(now, "\r")

    def _draw(self, now: float, end: str) -> None:
        speed = self.done / max(now - self._began, 1e-9)
        part = f" {self.done / self.total:4.0%}" if self.total else ""
        of = f" of {_size(self.total)}" if self.total else ""
        self.stream.write(f"\r{self.what}{part}: {_size(self.done)}{of}, {_size(speed)}/s   {end}")
        self.stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown and self.done:
            self._draw(time.monotonic(), "\n")


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"
