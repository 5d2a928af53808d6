"""`parallelize verify`: does the model compute the same numbers on a mesh? Torch-free until it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from parallelize.base.terminal.console import (
    FINE,
    PROBLEM_FOUND,
    add_json,
    add_quiet,
    print_json,
    quiet_libraries,
    shows_progress,
)
from parallelize.plan.options import add_options, options_given

_ABOUT = """\
Compare one training step on a mesh with the unsharded model: loss, outputs, gradients of the input and of every
parameter, their norm, and the weights after a step. A model's config is scaled down and keeps its structure. The ranks
are threads of one process, so neither a GPU nor torchrun is needed. Under torchrun the started processes are the
ranks."""

_DTYPES = ("float64", "float32", "bfloat16")
"""Those of `precision.DTYPES`, which needs torch."""


def add_commands(verbs: Any) -> None:
    """Add `verify` to a parser's subparsers."""
    parser = verbs.add_parser(
        "verify",
        help="compare a training step on a mesh with the unsharded model",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a config.json or its folder, a model type, a known size, or package.module:function",
    )
    parser.add_argument("--plan", metavar="PLAN", help="a shipped plan's name or a file (default: chosen by the model)")
    parser.add_argument(
        "--mesh", help="such as pp=2,dp=2,tp=2 (default: tp=4; tp=3 or tp=2 where 4 does not divide the heads)"
    )
    modes = dict.fromkeys(("sequence_parallel", "loss_parallel"), "run this mode only (default: every mode)")
    add_options(parser, {"dtype": _DTYPES}, **modes, dtype="of weights, compute and gradients (default: float64)")
    parser.add_argument("--backend", choices=("threads", "gloo"), help="gloo starts real processes (default: threads)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="how long ranks wait for each other (default: 120)"
    )
    parser.add_argument(
        "--no-trace", dest="trace", action="store_false", help="compare numbers also where the forward shows a mistake"
    )
    parser.add_argument("--full-size", action="store_true", help="do not scale the config down")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="K=V", help="fields of the config, or arguments"
    )
    add_json(parser)
    add_quiet(parser)
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    with quiet_libraries():
        result = _run(options)
    if os.environ.get("RANK", "0") == "0":
        if options.json:
            print_json(result.as_dict())
        else:
            print(result)
    return FINE if result.ok else PROBLEM_FOUND


def _run(options: argparse.Namespace) -> Any:
    from parallelize.plan.models.model_source import parse_overrides
    from parallelize.tools.verification.processes import under_torchrun
    from parallelize.tools.verification.verify import verify

    backend = "torchrun" if under_torchrun() else options.backend
    return verify(
        options.model,
        options.plan,
        options.mesh,
        backend=backend,
        overrides=parse_overrides(options.set),
        seed=options.seed,
        full_size=options.full_size,
        timeout_s=options.timeout,
        trace=None if options.trace else False,
        tell=_progress_printer(shows_progress(options)),
        **options_given(options),
    )


def _progress_printer(shown: bool) -> Callable[[str], None]:
    """A function that prints progress, if stderr is a terminal."""
    if not (shown and sys.stderr.isatty()):
        return lambda text: None
    return lambda text: print(f"verifying: {text}", file=sys.stderr, flush=True)
