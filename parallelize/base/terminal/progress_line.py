"""A line that shows the progress of long work, on a terminal only. Torch-free."""

from __future__ import annotations

import sys
import time
from typing import Any

_EVERY_S = 0.2
_CLEAR = "\r\x1b[K"  # return to the start of the line and clear it


class Progress:
    """Counts bytes or other units, and rewrites one line of the terminal.

        with Progress("loading", total=n) as progress:
            progress(num_bytes)

    The last state of the line stays. After an error the line is cleared, so that the message starts on an empty line.

    Args:
        what: what is done.
        shown: False on ranks that print nothing.
        total: 0 if it is unknown.
        stream: stderr by default.
        unit: "B" for bytes, or the plural of what is counted.
    """

    def __init__(self, what: str, shown: bool = True, total: int = 0, stream: Any = None, unit: str = "B"):
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self.stream = stream if stream is not None else sys.stderr
        self.shown = shown and bool(getattr(self.stream, "isatty", lambda: False)())
        self._start = self._last = time.monotonic()
        self._drawn = False

    def __call__(self, count: int = 1) -> None:
        self.done += count
        now = time.monotonic()
        if self.shown and now - self._last >= _EVERY_S:
            self._last = now
            self._write(self._text(now))

    def _text(self, now: float) -> str:
        speed = self.done / max(now - self._start, 1e-9)
        percent = f" {self.done / self.total:4.0%}" if self.total else ""
        of_total = f" of {self._count(self.total)}" if self.total else ""
        return f"{self.what}{percent}: {self._count(self.done)}{of_total}, {self._count(speed)}/s"

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
