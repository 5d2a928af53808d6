"""The parser of all verbs. A wing adds its own by a function `add_commands(verbs)`; `WINGS` is the one list of them.

What completion reads off the parser: options, sub-verbs, choices; an argument of metavar PLAN is completed with the
shipped plans, one whose type is `Path` (or that has no type and names a file in its metavar) with files.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from parallelize import __version__
from parallelize.analysis import commands as analysis
from parallelize.checkpoint import commands as checkpoint
from parallelize.cli import completion, environment, plans, schedule
from parallelize.console import STATUSES
from parallelize.errors import ParallelizeError, Problem, did_you_mean
from parallelize.verification import commands as verification

WINGS: tuple[Callable[[Any], None], ...] = (
    plans.add_commands,
    analysis.add_commands,
    verification.add_commands,
    schedule.add_commands,
    checkpoint.add_commands,
    environment.add_commands,
    completion.add_commands,
)

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)\Z", re.S)


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are problems like all others. Options are not shortened: `--json` is found as it is."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        found = _CHOICE.search(message)
        names = [name.strip("' ") for name in found.group(2).split(",")] if found else []
        fix = f"{did_you_mean(found.group(1), names)} " if found else ""
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        what = message[: found.start(2)].rpartition(" (")[0] if found else message
        raise ParallelizeError(Problem("usage", what, self.prog, (("usage", usage),), f"{fix}see `{self.prog} --help`"))


def build_parser() -> Parser:
    parser = Parser(
        prog="parallelize",
        description="Plans for parallel PyTorch models, and the checkpoints of their runs.",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"parallelize {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_commands in WINGS:
        add_commands(verbs)
    return parser
