"""How every command answers: one table of exit statuses, and mistakes as text for people or as one JSON document.

It stands below the command line, so that the wings that add verbs (`checkpoint`, `analysis`, `verify`) answer alike.
Torch-free.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from parallelize.errors import Problem

FINE, FOUND, MISTAKE, ENVIRONMENT = range(4)
INTERRUPTED = 130  # as shells count it: 128 + SIGINT

STATUSES = """\
exit status:
  0    fine
  1    looked, and found a difference or damage (verify, checkpoint verify)
  2    a mistake in what was given: arguments, a plan, a model, a checkpoint
  3    the environment: torch or another package is missing, no GPU where one was asked for, a file
       that cannot be read or written
  130  stopped by Ctrl-C

Results go to stdout, mistakes and progress to stderr. With --json one JSON document goes to stdout, whatever
happens: the result, or {"error": [{"slug", "where", "what", "rows", "fix"}, ...]} with the same exit status."""

# problems that are nobody's mistake on the command line
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
    """3 where only the environment is to blame, else 2."""
    return ENVIRONMENT if all(problem.slug in _ENVIRONMENT_SLUGS for problem in problems) else MISTAKE


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def shows_progress(options: argparse.Namespace) -> bool:
    """Whether a command may show how far it is: not beside JSON, not when told to be quiet, on one rank alone."""
    hushed = getattr(options, "json", False) or getattr(options, "quiet", False)
    return not hushed and os.environ.get("RANK", "0") == "0"


def as_data(problem: Problem) -> dict[str, Any]:
    """A problem as JSON takes it; `rows` keep their order."""
    rows = [list(row) for row in problem.rows]
    return {"slug": problem.slug, "where": problem.where, "what": problem.what, "rows": rows, "fix": problem.fix}


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def report(problems: Iterable[Problem], as_json: bool) -> None:
    """Say what is wrong: on stderr, or as the one document on stdout, which is rank 0's to print."""
    if as_json and os.environ.get("RANK", "0") == "0":
        print_json({"error": [as_data(problem) for problem in problems]})
        return
    for problem in problems:
        print(problem, file=sys.stderr)


def say(text: str) -> None:
    """A remark beside the result."""
    print(text, file=sys.stderr)
