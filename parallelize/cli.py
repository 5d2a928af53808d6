"""The command line. Commands that only read plans do not import torch.

Exit status: 0 fine, 2 a mistake in the input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from parallelize import __version__
from parallelize.checkpoint.commands import add_commands
from parallelize.errors import ParallelizeError, Problem
from parallelize.plan.load import load_plan, read_plan, shipped_plans
from parallelize.plan.schema import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except ParallelizeError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parallelize", description="Plans for parallel PyTorch models.")
    parser.add_argument("--version", action="version", version=f"parallelize {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)

    plans = verbs.add_parser("plans", help="list the plans that come with the package, or print one")
    plans.add_argument("name", nargs="?", help="print this plan's file")
    plans.add_argument("--json", action="store_true", help="print as JSON")
    plans.set_defaults(run=_plans)

    lint = verbs.add_parser("lint", help="check plan files: every mistake, with line, column and fix")
    lint.add_argument("plans", nargs="+", metavar="PLAN", help="a file, or a shipped plan's name")
    lint.add_argument("--json", action="store_true", help="print findings as JSON")
    lint.set_defaults(run=_lint)

    schedule = verbs.add_parser("schedule", help="look at a pipeline schedule: order, bubble, microbatches in flight")
    schedule.add_argument(
        "name", help="gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv, dualpipe_v"
    )
    schedule.add_argument("--ranks", type=int, required=True, help="of the pipeline")
    schedule.add_argument("--microbatches", type=int, required=True)
    schedule.add_argument("--stages-per-rank", type=int)
    schedule.add_argument("--svg", type=Path, help="draw it to this file")
    schedule.set_defaults(run=_schedule)

    add_commands(verbs)
    return parser


def _schedule(options: argparse.Namespace) -> int:
    from parallelize.pipeline.gantt import describe_schedule, draw  # PyTorch's orders need torch, plans do not
    from parallelize.pipeline.schedules import build_schedule
    from parallelize.pipeline.timeline import simulate

    given = (options.name, options.ranks, options.microbatches, options.stages_per_rank)
    print(describe_schedule(*given))
    if options.svg is not None:
        draw(simulate(build_schedule(*given)), options.svg, f"{options.name}, {options.ranks} ranks")
    return 0


def _plans(options: argparse.Namespace) -> int:
    if options.name and not options.json:
        plan = load_plan(options.name)
        print(Path(plan.source).read_text(encoding="utf-8"), end="")
        return 0
    found = [load_plan(options.name)] if options.name else [read_plan(path) for path in shipped_plans().values()]
    if options.json:
        print(json.dumps([_as_json(plan) for plan in found], indent=1))
        return 0
    width = max(len(plan.name) for plan in found)
    print(f"{'plan':<{width}}  model types                     rules  sequence parallel")
    for plan in found:
        types = ", ".join(plan.model_types)
        print(f"{plan.name:<{width}}  {types:<30}  {len(plan.rules):>5}  {'yes' if plan.region else 'no'}")
    return 0


def _as_json(plan: Plan) -> dict:
    return {
        "name": plan.name,
        "source": plan.source,
        "model_types": plan.model_types,
        "rules": {rule.pattern: str(rule.style) for rule in plan.rules},
    }


def _lint(options: argparse.Namespace) -> int:
    problems: list[Problem] = []
    fine: list[Plan] = []
    for name in options.plans:
        try:
            fine.append(load_plan(name))
        except ParallelizeError as error:
            problems += error.problems
    if options.json:
        keys = ("slug", "where", "what", "fix")
        print(json.dumps([{key: getattr(problem, key) for key in keys} for problem in problems], indent=1))
    else:
        for problem in problems:
            print(problem, file=sys.stderr)
        for plan in fine:
            print(f"{plan.source}: {len(plan.rules)} rules, no mistakes")
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
