"""The options of a run as arguments of the command line: the same flags for every command. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from parallelize.plan.options import AUTO, DTYPES, NAMES, RECOMPUTE, dtype_name
from parallelize.plan.styles.contract import OVERLAPS

_BY_PLAN = " (default: the plan's, else {})"


def _flag_or_auto(text: str) -> bool | str:
    """Raises: ArgumentTypeError."""
    values: dict[str, bool | str] = {"on": True, "true": True, "off": False, "false": False, AUTO: AUTO}
    if text not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is none of on, off and auto")
    return values[text]


_ARGUMENTS: dict[str, dict[str, Any]] = {
    "schedule": {"help": "of the pipeline" + _BY_PLAN.format("1f1b")},
    "num_microbatches": {"type": int, "metavar": "N", "help": "microbatches of a step (default: twice pp)"},
    "stages_per_rank": {"type": int, "metavar": "N", "help": "pipeline stages of each rank (default: by the schedule)"},
    "zero": {"type": int, "choices": range(4), "help": "ZeRO stage over dp" + _BY_PLAN.format(0)},
    "defer": {"help": "ZeRO 2 and 3 reduce gradients once a step"},
    "sequence_parallel": {"help": "norms and residuals are sequence shards over tp"},
    "loss_parallel": {"help": "logits stay shards of the vocabulary over tp"},
    "fuse_loss": {"help": "compute head and loss together, one chunk of tokens at a time"},
    "overlap": {"choices": OVERLAPS, "help": "collectives overlapped with matmuls" + _BY_PLAN.format("off")},
    "overlap_microbatches": {
        "nargs": "?",
        "const": True,
        "type": _flag_or_auto,
        "metavar": "on|off|auto",
        "help": "a forward runs beside the backward of the microbatch before it; auto: where the first steps are faster so",
    },
    "ulysses": {"type": int, "metavar": "N", "help": "ranks of cp that exchange heads; the rest forms a ring"},
    "ep": {"type": int, "metavar": "N", "help": "ranks over which whole experts are divided, folded over dp x cp x tp"},
    "etp": {
        "type": int,
        "metavar": "N",
        "help": "ranks over which each expert is split; experts are on ep x etp ranks",
    },
    "recompute": {"choices": RECOMPUTE, "help": "activations computed again in backward" + _BY_PLAN.format("off")},
    "recompute_every": {"type": int, "metavar": "N", "help": "of the units, only every N-th"},
    "recompute_save": {"nargs": "+", "metavar": "KIND", "help": "what selective recompute saves"},
    "dtype": {"choices": DTYPES, "type": dtype_name, "help": "of compute"},
    "reduce_dtype": {"choices": DTYPES, "type": dtype_name, "help": "of sums of gradients over data ranks"},
    "compare_every": {
        "type": int,
        "metavar": "N",
        "help": "in the first step, and every N-th after it, compare parameters that ranks store alike; 0: never"
        + _BY_PLAN.format(100),
    },
}
_SHORT = {"num_microbatches": ("--microbatches",)}


def add_options(
    parser: argparse.ArgumentParser, choices: Mapping[str, Sequence[str]] | None = None, **help_texts: str
) -> None:
    """Add a flag for each option. Without it the option is None: the plan's default.

    choices: by option, where a command takes fewer values than the others.
    help_texts: by option, where a command says more than the others.
    """
    for name in NAMES:
        arguments = dict(_ARGUMENTS[name])
        if len(arguments) == 1 and name != "schedule":
            arguments["action"] = argparse.BooleanOptionalAction
        if choices and name in choices:
            arguments["choices"] = choices[name]
        arguments["help"] = help_texts.get(name, arguments["help"])
        parser.add_argument(f"--{name.replace('_', '-')}", *_SHORT.get(name, ()), default=None, **arguments)


def options_given(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_options` that the command line gives, by name."""
    return {name: value for name in NAMES if (value := getattr(options, name, None)) is not None}
