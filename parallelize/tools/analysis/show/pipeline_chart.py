"""A picture of the pipeline: a lane per rank, a box per action.

Very narrow neighbors are merged. Many boxes are drawn as one path per color.
"""

from __future__ import annotations

from collections.abc import Iterator

from parallelize.axes.pipeline.timeline import Timeline
from parallelize.tools.analysis.show.canvas import (
    WIDTH,
    axis_below,
    box,
    duration,
    legend,
    percent,
    picture,
    shortened,
    text_at,
    text_width,
    time_scale,
)

KINDS = {"F": "forward", "B": "backward", "I": "backward, dgrad", "W": "backward, wgrad"}
_FILLS = {"F": "c0", "B": "c1", "I": "c2", "W": "c3"}
_LEFT, _TOP = 76.0, 30.0
_MAX_BOXES = 1200  # that are drawn one by one, with a tooltip each
_MIN_BOX_WIDTH = 1.2  # in units of the picture; narrower neighbors of one color are merged

Box = tuple[float, float, str, str]  # start, stop, fill, label


def draw_pipeline(timeline: Timeline, title: str, end: float = 0.0) -> str:
    """end: seconds at the right edge, to draw two timelines to one scale."""
    end = end or timeline.makespan or 1.0
    most = max(map(len, timeline.spans))
    width = float(max(WIDTH, min(2400, 12 * most)))
    lane = 24.0 if len(timeline.spans) <= 8 else 16.0
    floor = _TOP + (lane + 4) * len(timeline.spans)
    across = (width - _LEFT - 16) / end
    factor, unit = time_scale(end)
    facts = f"{title}: {duration(timeline.makespan)}, bubbles {percent(timeline.bubble_fraction)} (estimate)"
    body = [text_at(6, 18, shortened(facts, width - 20, 13), style="title", size=13)]
    body += axis_below(_LEFT, width - 16, _TOP - 4, floor, end * factor, f"time, {unit} (estimate)")
    one_by_one = sum(map(len, timeline.spans)) <= _MAX_BOXES
    for rank in range(len(timeline.spans)):
        y = _TOP + (lane + 4) * rank
        body += [text_at(6, y + lane / 2 + 4, f"pp rank {rank}", size=11)]
        body.append(box(_LEFT, y, timeline.makespan * across, lane, "idle"))
        boxes = list(_merged(timeline, rank, across))
        body += _separate_boxes(boxes, y, lane, across) if one_by_one else _paths(boxes, y, lane, across)
    key, bottom = legend([*_entries(timeline), ("idle", "idle (bubble)")], _LEFT, width - 10, floor + 40)
    return picture(facts, width, bottom + 2, [*body, *key])


def _separate_boxes(boxes: list[Box], y: float, lane: float, across: float) -> list[str]:
    body = []
    for start, stop, fill, label in boxes:
        x, width = _LEFT + start * across, (stop - start) * across
        body.append(box(x, y, width, lane, f"{fill} frame", f"{label}: {duration(start)} to {duration(stop)}"))
        number = label[1:]
        if width > text_width(number, 10) + 2:
            style = "on" if fill == "c0" else "dark"
            body.append(text_at(x + width / 2, y + lane / 2 + 4, number, "middle", style, 10))
    return body


def _paths(boxes: list[Box], y: float, lane: float, across: float) -> list[str]:
    """One path per color: a tenth of the bytes, without tooltips."""
    paths: dict[str, list[str]] = {}
    for start, stop, fill, _ in boxes:
        x, width = _LEFT + start * across, max((stop - start) * across, 0.3)
        paths.setdefault(fill, []).append(f"M{x:.1f} {y:g}h{width:.1f}v{lane:g}h-{width:.1f}z")
    return [f'<path d="{"".join(parts)}" class="{fill} frame"/>' for fill, parts in paths.items()]


def _merged(timeline: Timeline, rank: int, across: float) -> Iterator[Box]:
    """The boxes of a rank. across: units of the picture per second."""
    previous: Box | None = None
    stages = sorted({action.stage for action, _, _ in timeline.spans[rank]})
    for action, start, stop in timeline.spans[rank]:
        fill = _fill(action.kind, stages.index(action.stage), len(stages))
        label = f"{action.kind}{action.microbatch}" + (f" of stage {action.stage}" if len(stages) > 1 else "")
        current = (start, stop, fill, label)
        if previous is not None and _can_merge(previous, current, across):
            previous = previous[0], stop, fill, f"{previous[3].split(' to ')[0]} to {label}"
            continue
        if previous is not None:
            yield previous
        previous = current
    if previous is not None:
        yield previous


def _can_merge(first: Box, second: Box, across: float) -> bool:
    """Whether two boxes have one color, touch, and are narrow together."""
    touch = second[0] - first[1] < 1e-12
    return first[2] == second[2] and touch and (second[1] - first[0]) * across < _MIN_BOX_WIDTH


def _fill(kind: str, stage_index: int, num_stages: int) -> str:
    """Later stages of a rank are paler."""
    return _FILLS[kind] + (f" pale{min(3, round(3 * stage_index / (num_stages - 1)))}" if stage_index else "")


def _entries(timeline: Timeline) -> list[tuple[str, str]]:
    kinds = {action.kind for spans in timeline.spans for action, _, _ in spans}
    several = max(len({action.stage for action, _, _ in spans}) for spans in timeline.spans) > 1
    entries = [(_FILLS[kind], name) for kind, name in KINDS.items() if kind in kinds]
    return [*entries, ("c0 pale3", "paler: later stages of the rank")] if several else entries
