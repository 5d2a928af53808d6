"""`parallelize schedule`: the order of actions, the bubble and the microbatches in flight of a pipeline schedule."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from parallelize.base.terminal.console import FINE, add_json, print_json

# listed here so that `--help` and completion import no schedule; a test compares the lists
NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v")


def add_commands(verbs: Any) -> None:
    schedule = verbs.add_parser("schedule", help="show a pipeline schedule: order, bubble, microbatches in flight")
    name = schedule.add_argument("name", metavar="NAME", help=", ".join(NAMES))
    name.completed_with = NAMES  # no `choices`, because other spellings of these names are accepted
    schedule.add_argument("--ranks", type=int, required=True, help="of the pipeline")
    schedule.add_argument("--microbatches", type=int, required=True)
    schedule.add_argument("--stages-per-rank", type=int)
    schedule.add_argument("--svg", type=Path, metavar="FILE", help="draw it to this file")
    add_json(schedule)
    schedule.set_defaults(run=_schedule)


def _schedule(options: argparse.Namespace) -> int:
    from parallelize.axes.pipeline.schedule_chart import describe_schedule, draw  # some need torch
    from parallelize.axes.pipeline.schedules import build_schedule
    from parallelize.axes.pipeline.timeline import simulate

    arguments = (options.name, options.ranks, options.microbatches, options.stages_per_rank)
    if options.json:
        print_json(_as_data(*arguments))
    else:
        print(describe_schedule(*arguments))
    if options.svg is not None:
        draw(simulate(build_schedule(*arguments)), options.svg, f"{options.name}, {options.ranks} ranks")
    return FINE


def _as_data(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> dict[str, Any]:
    """The schedule as JSON data. The unit of time is one forward of one stage, as in the text."""
    from parallelize.axes.pipeline.schedules import build_schedule
    from parallelize.axes.pipeline.timeline import simulate

    schedule = build_schedule(name, ranks, microbatches, stages_per_rank)
    timeline = simulate(schedule)
    return {
        "name": schedule.name,
        "ranks": ranks,
        "microbatches": microbatches,
        "makespan": timeline.makespan,
        "bubble_fraction": timeline.bubble_fraction,
        "stage_ranks": list(schedule.stage_ranks),
        "in_flight": list(timeline.in_flight.stages),
        "orders": [[str(action) for action in order] for order in schedule.orders],
    }
