"""Text tables, summaries and SVG charts of schedules and timelines, without a plotting package. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from parallelize.axes.pipeline.schedules import KINDS, Schedule, build_schedule
from parallelize.axes.pipeline.timeline import Costs, Timeline, simulate
from parallelize.base.pictures.svg import axis_below, box, picture, standalone, text_at, text_width


def table(schedule: Schedule) -> str:
    """One line per rank, one column per unit of time (a forward, or half of a backward); dots are bubbles.

    >>> print(table(build_schedule("1f1b", num_ranks=2, num_microbatches=2)))
    rank 0  0F0 0F1 .   .   0B0---- .   0B1----
    rank 1  .   1F0 1B0---- 1F1 1B1---- .   .
    """
    timeline = simulate(schedule)
    width = 1 + max(len(str(action)) for order in schedule.orders for action in order)
    first = len(f"rank {schedule.num_ranks - 1}")
    lines = []
    for rank, spans in enumerate(timeline.spans):
        cells, now = [], 0
        for action, start, stop in spans:
            cells.append(".".ljust(width) * (round(start) - now))
            cells.append(str(action).ljust(width * round(stop - start) - 1, "-" if action.kind == "B" else " ") + " ")
            now = round(stop)
        cells.append(".".ljust(width) * (round(timeline.makespan) - now))
        lines.append(f"rank {rank}".ljust(first) + "  " + "".join(cells).rstrip())
    return "\n".join(lines)


def describe_schedule(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None, costs: Costs | None = None
) -> str:
    """Describe a schedule: its table, makespan and bubbles, and the largest number of microbatches in flight per stage.

    Args:
        name: as in `build_schedule`.
        num_ranks: ranks of the pipeline.
        num_microbatches: microbatches of a step.
        stages_per_rank: as in `build_schedule`.
        costs: time of each action, in any unit, for makespan and bubbles. The table shows equal stages in any case.

    Returns: text of several lines.

    Raises:
        PlanError, MeshError: those of `build_schedule`, and `bad-costs`.

    Cost: no communication.
    """
    schedule = build_schedule(name, num_ranks, num_microbatches, stages_per_rank)
    timeline = simulate(schedule, costs)
    costs = costs or Costs()
    cost = f"forward {costs.forward}, backward {costs.backward}, send {costs.send}"
    sizes = f"{num_ranks} ranks, {schedule.num_stages} stages, {num_microbatches} microbatches"
    rows = {
        "stage": range(schedule.num_stages),
        "on rank": schedule.stage_ranks,
        "in flight, at most": timeline.in_flight.stages,
    }
    return "\n".join(
        [
            f"{schedule.name}: {sizes}\n\n{table(schedule)}\n",
            f"{_reading(schedule)}\n",
            f"makespan {timeline.makespan:g} ({cost}), bubbles {timeline.bubble_fraction:.1%}\n",
            *(f"{label:<18}" + "".join(f"{value:>4}" for value in values) for label, values in rows.items()),
        ]
    )


def _reading(schedule: Schedule) -> str:
    """How to read the cells of a table."""
    kinds = {action.kind for order in schedule.orders for action in order}
    letters = ", ".join(f"{letter}: {name}" for letter, name in KINDS.items() if letter in kinds)
    return f"0F1: stage 0, forward, microbatch 1. {letters}, .: idle"


_FILLS = {"F": "c0", "B": "c5", "I": "c2", "W": "c3"}
_SHADES = ("", " pale1", " pale2", " pale3")
_LEFT, _TOP, _LANE, _GAP, _WIDTH = 66.0, 62.0, 30.0, 6.0, 1120.0


def draw(timeline: Timeline, path: str | os.PathLike[str], title: str, unit: str = "units") -> None:
    """Write a Gantt chart as SVG: a lane per rank, a box per action with its microbatch, a shade per stage of the rank.

    Args:
        timeline: simulated or measured.
        path: the path of the SVG file.
        title: above the chart.
        unit: label of the time axis. For "ms" the timeline is in seconds, and is drawn in milliseconds.
    """
    scale = 1000.0 if unit == "ms" else 1.0
    end = timeline.makespan * scale or 1.0
    right = _WIDTH - 24
    across = (right - _LEFT) / end
    floor = _TOP + len(timeline.spans) * (_LANE + _GAP)
    ranks = timeline.in_flight.ranks
    peaks = ", ".join(map(str, ranks)) if len(ranks) <= 24 else f"{max(ranks)}"
    facts = (
        f"{end:.4g} {unit}, bubbles {timeline.bubble_fraction:.1%}; microbatches in flight per rank, at most: {peaks}"
    )
    body = [text_at(16, 26, title, style="title", size=16), text_at(16, 46, facts, style="quiet")]
    body += axis_below(_LEFT, right, _TOP - 4, floor, end, f"time, {unit}")
    for rank in range(len(timeline.spans)):
        body += _lane(timeline, rank, scale, across)
    body += _legend(timeline, floor + 44)
    height = floor + 44 + 20 * _most_stages(timeline) + 14
    Path(path).write_text(standalone(picture(title, _WIDTH, height, body)), encoding="utf-8")


def _lane(timeline: Timeline, rank: int, scale: float, across: float) -> list[str]:
    y = _TOP + rank * (_LANE + _GAP)
    body = [
        text_at(16, y + 19, f"rank {rank}"),
        box(_LEFT, y, timeline.makespan * scale * across, _LANE, "idle"),
    ]
    stages = _stages(timeline, rank)
    for action, start, stop in timeline.spans[rank]:
        x, wide = _LEFT + start * scale * across, (stop - start) * scale * across
        fill, color = _shade(action.kind, stages.index(action.stage), _most_stages(timeline))
        hint = f"{action}: {start * scale:.4g} to {stop * scale:.4g}"
        frame = " frame" if wide > 3 else ""  # which would hide a narrow box
        body.append(box(x, y, wide, _LANE, f"action {fill}{frame}", hint))
        label = str(action.microbatch)
        if wide > text_width(label, 11) + 2:
            body.append(text_at(x + wide / 2, y + 19, label, "middle", color, 11))
    return body


def _stages(timeline: Timeline, rank: int) -> list[int]:
    return sorted({action.stage for action, _, _ in timeline.spans[rank]})


def _most_stages(timeline: Timeline) -> int:
    return max((len(_stages(timeline, rank)) for rank in range(len(timeline.spans))), default=1) or 1


def _shade(kind: str, index: int, count: int) -> tuple[str, str]:
    """(fill, style of the text in it) for a rank's stage number `index` of `count`: full color for the first, paler for
    later ones."""
    shade = index * (len(_SHADES) - 1) // max(1, count - 1)
    return _FILLS[kind] + _SHADES[shade], "" if shade else "dark" if kind == "W" else "on"


def _legend(timeline: Timeline, y: float) -> list[str]:
    """A row for each stage of a rank, a column for each kind of action that occurs."""
    used = {action.kind for spans in timeline.spans for action, _, _ in spans}
    kinds = [kind for kind in KINDS if kind in used]
    by_rank = [_stages(timeline, rank) for rank in range(len(timeline.spans))]
    count = _most_stages(timeline)
    body = []
    for row in range(count):
        stages = [of_rank[row] for of_rank in by_rank if row < len(of_rank)]
        several = len(set(stages)) > 1
        label = f"stages {min(stages)} to {max(stages)}" if several else f"stage {min(stages, default=0)}"
        for column, kind in enumerate(kinds):
            x = _LEFT + 220 * column
            body.append(box(x, y + 20 * row, 14, 12, _shade(kind, row, count)[0]))
            body.append(text_at(x + 20, y + 20 * row + 10, f"{KINDS[kind]}, {label}", size=11))
    x = _LEFT + 220 * len(kinds)
    return [*body, box(x, y, 14, 12, "idle"), text_at(x + 20, y + 10, "bubble", size=11)]
