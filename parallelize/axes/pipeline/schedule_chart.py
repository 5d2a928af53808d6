"""Text tables, summaries and SVG charts of schedules and timelines, without a plotting package. Torch-free."""

from __future__ import annotations

import math
import os
from html import escape
from pathlib import Path

from parallelize.axes.pipeline.schedules import KINDS, Schedule, build_schedule
from parallelize.axes.pipeline.timeline import Costs, Timeline, simulate


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


_COLORS = {"F": (47, 108, 178), "B": (202, 98, 33), "I": (38, 139, 107), "W": (131, 90, 168)}
_LEFT, _TOP, _LANE, _GAP, _WIDTH = 66, 62, 30, 6, 1120
_FONT = 'font-family="Helvetica, Arial, sans-serif"'


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
    across = (_WIDTH - _LEFT - 24) / end
    floor = _TOP + len(timeline.spans) * (_LANE + _GAP)
    ranks = timeline.in_flight.ranks
    peaks = ", ".join(map(str, ranks)) if len(ranks) <= 24 else f"{max(ranks)}"
    facts = (
        f"{end:.4g} {unit}, bubbles {timeline.bubble_fraction:.1%}; microbatches in flight per rank, at most: {peaks}"
    )
    body = [_text(16, 26, title, size=16, weight="bold"), _text(16, 46, facts, color="#555")]
    body += _axis(end, across, floor, unit)
    for rank in range(len(timeline.spans)):
        body += _lane(timeline, rank, scale, across)
    body += _legend(timeline, floor + 44)
    _write(Path(path), floor + 44 + 20 * _most_stages(timeline) + 14, body)


def _lane(timeline: Timeline, rank: int, scale: float, across: float) -> list[str]:
    y = _TOP + rank * (_LANE + _GAP)
    width = timeline.makespan * scale * across
    body = [_text(16, y + 19, f"rank {rank}"), _rect(_LEFT, y, width, "#ededed", "")]
    stages = _stages(timeline, rank)
    for action, start, stop in timeline.spans[rank]:
        x, wide = _LEFT + start * scale * across, (stop - start) * scale * across
        fill, color = _shade(action.kind, stages.index(action.stage), _most_stages(timeline))
        label = str(action.microbatch)
        hint = f"{action}: {start * scale:.4g} to {stop * scale:.4g}"
        body.append(_rect(x, y, wide, fill, hint))
        if wide > 7 * len(label) + 2:
            body.append(_text(x + wide / 2, y + 19, label, size=11, color=color, anchor="middle"))
    return body


def _stages(timeline: Timeline, rank: int) -> list[int]:
    return sorted({action.stage for action, _, _ in timeline.spans[rank]})


def _most_stages(timeline: Timeline) -> int:
    return max((len(_stages(timeline, rank)) for rank in range(len(timeline.spans))), default=1) or 1


def _shade(kind: str, index: int, count: int) -> tuple[str, str]:
    """(fill, text color) for a rank's stage number `index` of `count`: full color for the first, paler for later
    ones."""
    pale = 0.62 * index / max(1, count - 1)
    red, green, blue = (round(channel + (255 - channel) * pale) for channel in _COLORS[kind])
    return f"#{red:02x}{green:02x}{blue:02x}", "white" if pale < 0.35 else "#1c1c1c"


def _axis(end: float, across: float, floor: float, unit: str) -> list[str]:
    step = 10 ** math.floor(math.log10(end))
    step = next(step * factor for factor in (0.1, 0.2, 0.5, 1) if end / (step * factor) <= 16)
    if unit == "units":
        step = max(1, step)
    body = []
    for n in range(math.floor(end / step + 1e-9) + 1):
        x = _LEFT + n * step * across
        body.append(f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{floor}" stroke="#dcdcdc"/>')
        body.append(_text(x, floor + 14, f"{n * step:g}", size=11, color="#555", anchor="middle"))
    return [*body, _text(_WIDTH - 24, floor + 28, f"time, {unit}", size=11, color="#555", anchor="end")]


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
            fill, _ = _shade(kind, row, count)
            body.append(f'<rect x="{x}" y="{y + 20 * row}" width="14" height="12" rx="2" fill="{fill}"/>')
            body.append(_text(x + 20, y + 20 * row + 10, f"{KINDS[kind]}, {label}", size=11))
    x = _LEFT + 220 * len(kinds)
    body.append(f'<rect x="{x}" y="{y}" width="14" height="12" rx="2" fill="#ededed"/>')
    return [*body, _text(x + 20, y + 10, "bubble", size=11)]


def _rect(x: float, y: float, width: float, fill: str, hint: str) -> str:
    """A box in a lane. With a hint it is an action, with a white frame that separates it from its neighbors."""
    attributes = f'x="{x:.2f}" y="{y}" width="{max(width, 0.4):.2f}" height="{_LANE}" fill="{fill}"'
    if not hint:
        return f"<rect {attributes}/>"
    frame = 'stroke="white" stroke-width="0.8"' if width > 3 else ""
    return f'<rect class="action" {attributes} rx="2" {frame}><title>{escape(hint)}</title></rect>'


def _text(
    x: float,
    y: float,
    text: str,
    size: int = 12,
    color: str = "#1c1c1c",
    anchor: str = "start",
    weight: str = "normal",
) -> str:
    style = f'{_FONT} font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _write(path: Path, height: float, body: list[str]) -> None:
    size = f'width="{_WIDTH}" height="{height:g}" viewBox="0 0 {_WIDTH} {height:g}"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    picture = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', background, *body, "</svg>"]
    path.write_text("\n".join(picture) + "\n", encoding="utf-8")
