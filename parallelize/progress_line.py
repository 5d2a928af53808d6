"""A line that tells how far long work has come: on a terminal, and nowhere else. Torch-free."""

from __future__ import annotations

import sys
import time
from typing import Any

_EVERY_S = 0.2
_CLEAR = "\r\x1b[K"  # back to the beginning of the line, and what stood there away


class Progress:
    """Counts bytes, or `unit`s. `total` may be unknown; `shown`: False on ranks that keep quiet.

    with Progress("loading", total=n) as progress: progress(num_bytes)

    One line is written over and over. The last state of it stays; after an error it goes, for the message to come.
    """

    def __init__(self, what: str, shown: bool = True, total: int = 0, stream: Any = None, unit: str = "B"):
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self.stream = stream if stream is not None else sys.stderr
        self.shown = shown and bool(getattr(self.stream, "isatty", lambda: False)())
        self._began = self._last = time.monotonic()
        self._drawn = False

    def __call__(self, count: int = 1) -> None:
        self.done += count
        now = time.monotonic()
        if self.shown and now - self._last >= _EVERY_S:
            self._last = now
            self._write(self._text(now))

    def _text(self, now: float) -> str:
        speed = self.done / max(now - self._began, 1e-9)
        part = f" {self.done / self.total:4.0%}" if self.total else ""
        of = f" of {self._count(self.total)}" if self.total else ""
        return f"{self.what}{part}: {self._count(self.done)}{of}, {self._count(speed)}/s"

    def _count(self, number: float) -> str:
        return _size(number) if self.unit == "B" else f"{number:,.0f} {self.unit}"

    def _write(self, text: str) -> None:
        self.stream.write(_CLEAR + text)
        self.stream.flush()
        self._drawn = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.shown:
            return
        if kind is None and self.done:
            self._write(self._text(time.monotonic()) + "\n")
        elif self._drawn:
            self._write("")


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"
