"""The output that all commands have in common: exit statuses, and errors as text or as one JSON document.

It is below the command line, because the rooms that add commands (`checkpoint`, `analysis`, `verification`) import it.
Torch-free.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
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
