"""The parser of all commands. Every room adds its own by a function `add_commands(verbs)`; `ADD_COMMANDS` lists them.

Completion reads options, subcommands and choices from the parser. An argument with the metavar PLAN is completed with
the shipped plans, an argument whose type is `Path` or whose metavar names a file with files.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from parallelize import __version__
from parallelize.base.errors import ParallelizeError, Problem, did_you_mean
from parallelize.base.terminal.console import STATUSES
from parallelize.checkpoint.tools import commands as checkpoint
from parallelize.cli import completion, environment, plans, schedule
from parallelize.launch import commands as launch
from parallelize.tools.analysis import commands as analysis
from parallelize.tools.verification import commands as verification
from parallelize.watchdog import commands as watchdog

ADD_COMMANDS: tuple[Callable[[Any], None], ...] = (
    plans.add_commands,
    analysis.add_commands,
    verification.add_commands,
    schedule.add_commands,
    launch.add_commands,
    checkpoint.add_commands,
    watchdog.add_commands,
    environment.add_commands,
    completion.add_commands,
)

_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)\Z", re.S)


class Parser(argparse.ArgumentParser):
    """A parser that raises ParallelizeError `usage`. Options cannot be abbreviated, so `--json` is in the arguments as
    it is."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        fix, what = "", message
        choice = _CHOICE.search(message)
        if choice:
            names = [name.strip("' ") for name in choice.group(2).split(",")]
            fix = f"{did_you_mean(choice.group(1), names)} "
            what = message[: choice.start(2)].rpartition(" (")[0]
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        raise ParallelizeError(Problem("usage", what, self.prog, (("usage", usage),), f"{fix}see `{self.prog} --help`"))


def parsed(arguments: list[str]) -> argparse.Namespace:
    """The options of a command line. `KEY=VALUE` of `run` may stand after options too. Raises: ParallelizeError
    `usage`."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    later = [argument for argument in rest if "=" in argument and not argument.startswith("-")]
    if later and hasattr(options, "overrides"):
        options.overrides = [*options.overrides, *later]
        rest = [argument for argument in rest if argument not in later]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def build_parser() -> Parser:
    parser = Parser(
        prog="parallelize",
        description="Plans for parallel PyTorch models, and the checkpoints of their runs.",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"parallelize {__version__}")
    parser.set_defaults(build_parser=build_parser)  # for `completion`
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_commands in ADD_COMMANDS:
        add_commands(verbs)
    return parser
