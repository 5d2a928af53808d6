"""The output that all commands have in common: exit statuses, and errors as text or as one JSON document.

It is below the command line, because the rooms that add commands (`checkpoint`, `analysis`, `verification`) import it.
Torch-free.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from parallelize.base.errors import Problem, folded, printable

FINE, PROBLEM_FOUND, MISTAKE, ENVIRONMENT = range(4)
INTERRUPTED = 130  # as in shells: 128 + SIGINT
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: try again later

STATUSES = """\
exit status:
  0    fine
  1    the command found a difference, damage or why a run stopped (verify, checkpoint verify, diagnose)
  2    a mistake in the input: arguments, a plan, a model, a checkpoint
  3    the environment: torch or another package is missing or broken, no GPU where one was asked for,
       a file that cannot be read or written
  75   a signal has stopped a run, which is saved: start it again
  130  stopped by Ctrl-C

Results go to stdout, mistakes and progress to stderr. With --json one JSON document goes to stdout in every
case: the result, or {"error": [{"slug", "where", "what", "rows", "fix"}, ...]} with the same exit status."""

# slugs of problems that are not a mistake on the command line
_ENVIRONMENT_SLUGS = {
    "missing-package",
    "no-transformers",
    "no-gpu",
    "unreadable-file",
    "write-failed",
    "file-error",
    "ranks-lost",
    "ranks-missing",
    "ranks-timed-out",
}


def status_of(problems: Iterable[Problem]) -> int:
    """The exit status: 3 if all problems are of the environment, else 2."""
    return ENVIRONMENT if all(problem.slug in _ENVIRONMENT_SLUGS for problem in problems) else MISTAKE


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def shows_progress(options: argparse.Namespace) -> bool:
    """Whether a command may show progress: on rank 0, without `--json` and `--quiet`."""
    quiet = getattr(options, "json", False) or getattr(options, "quiet", False)
    return not quiet and os.environ.get("RANK", "0") == "0"


def as_data(problem: Problem) -> dict[str, Any]:
    """A problem as JSON data. `rows` keep their order."""
    rows = [list(row) for row in problem.rows]
    return {"slug": problem.slug, "where": problem.where, "what": problem.what, "rows": rows, "fix": problem.fix}


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def report(problems: Iterable[Problem], as_json: bool) -> None:
    """Print problems: as text on stderr, or as one JSON document on stdout, which only rank 0 prints."""
    if as_json and os.environ.get("RANK", "0") == "0":
        print_json({"error": [as_data(problem) for problem in problems]})
        return
    for text in folded(list(problems)):
        print(text, file=sys.stderr)


def show(text: str) -> None:
    """Print a result that has names from files, which are not trusted."""
    print(printable(text))


def say(text: str) -> None:
    """Print a remark on stderr, which is not part of the result."""
    print(printable(text), file=sys.stderr)


# -- progress line ---------------------------------------------------------------------------------------------------
# A line that shows the progress of long work. Torch-free.


_EVERY_S = 0.2
_EVERY_S_IN_LINES = 5.0  # where each is a line of its own: a pipe, a file, a log
_CLEAR = "\r\x1b[K"  # return to the start of the line and clear it


class Progress:
    """Counts bytes or other units, and rewrites one line of the terminal; elsewhere writes a line now and then, of work
    that takes longer than that.

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
        self.shown, self._rewrites = shown, bool(getattr(self.stream, "isatty", lambda: False)())
        self._start = self._last = time.monotonic()
        self._drawn = False

    def __call__(self, count: int = 1) -> None:
        self.done += count
        now = time.monotonic()
        if self.shown and now - self._last >= (_EVERY_S if self._rewrites else _EVERY_S_IN_LINES):
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
        self.stream.write(_CLEAR + text if self._rewrites else text.rstrip("\n") + "\n")
        self.stream.flush()
        self._drawn = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.shown or not (self._rewrites or self._drawn):
            return
        if kind is None and self.done:
            self._write(self._text(time.monotonic()) + "\n")
        elif self._rewrites and self._drawn:
            self._write("")


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"


# -- quiet -----------------------------------------------------------------------------------------------------------
# Commands that build tiny models, without the warnings of libraries about them. Torch-free.


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence warnings of libraries, which only concern tiny models."""
    level = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)
