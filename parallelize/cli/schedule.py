"""`parallelize schedule`: a pipeline schedule's order, bubbles and microbatches in flight, before anything is run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from parallelize.console import FINE, add_json, print_json

# written out, so that `--help` and completion import no schedule; a test compares them
NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipe_v")


def add_commands(verbs: Any) -> None:
    schedule = verbs.add_parser("schedule", help="look at a pipeline schedule: order, bubble, microbatches in flight")
    name = schedule.add_argument("name", metavar="NAME", help=", ".join(NAMES))
    name.completed_with = NAMES  # no `choices`: other spellings of these names are understood too
    schedule.add_argument("--ranks", type=int, required=True, help="of the pipeline")
    schedule.add_argument("--microbatches", type=int, required=True)
    schedule.add_argument("--stages-per-rank", type=int)
    schedule.add_argument("--svg", type=Path, metavar="FILE", help="draw it to this file")
    add_json(schedule)
    schedule.set_defaults(run=_schedule)


def _schedule(options: argparse.Namespace) -> int:
    from parallelize.pipeline.gantt import describe_schedule, draw  # some orders are PyTorch's and need torch
    from parallelize.pipeline.schedules import build_schedule
    from parallelize.pipeline.timeline import simulate

    given = (options.name, options.ranks, options.microbatches, options.stages_per_rank)
    if options.json:
        print_json(_as_data(*given))
    else:
        print(describe_schedule(*given))
    if options.svg is not None:
        draw(simulate(build_schedule(*given)), options.svg, f"{options.name}, {options.ranks} ranks")
    return FINE


def _as_data(name: str, ranks: int, microbatches: int, stages_per_rank: int | None) -> dict[str, Any]:
    """Times in units of one forward of one stage, as the text has them."""
    from parallelize.pipeline.schedules import build_schedule
    from parallelize.pipeline.timeline import simulate

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
