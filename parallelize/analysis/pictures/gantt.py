"""A picture of the pipeline: a lane a rank, a box an action. Slivers are merged, many boxes drawn as one path a colour."""

from __future__ import annotations

from collections.abc import Iterator

from parallelize.analysis.pictures.canvas import WIDTH, axis_below, box, cut, legend, picture, time_scale, wide, words
from parallelize.analysis.pictures.words import duration, percent
from parallelize.pipeline.timeline import Timeline

KINDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_FILLS = {"F": "c0", "B": "c1", "I": "c2", "W": "c3"}
_LEFT, _TOP = 76.0, 30.0
_MOST_BOXES = 1200  # with a hint each
_SLIVER = 1.2  # units of the picture; narrower neighbours of one colour become one

Box = tuple[float, float, str, str]  # start, stop, fill, label


def draw_pipeline(timeline: Timeline, title: str, end: float = 0.0) -> str:
    """`end`: seconds at the right edge, to draw two timelines alike."""
    end = end or timeline.makespan or 1.0
    most = max(map(len, timeline.spans))
    width = float(max(WIDTH, min(2400, 12 * most)))
    lane = 24.0 if len(timeline.spans) <= 8 else 16.0
    floor = _TOP + (lane + 4) * len(timeline.spans)
    across = (width - _LEFT - 16) / end
    factor, unit = time_scale(end)
    facts = f"{title}: {duration(timeline.makespan)}, bubbles {percent(timeline.bubble_fraction)} (estimate)"
    body = [words(6, 18, cut(facts, width - 20, 13), style="title", size=13)]
    body += axis_below(_LEFT, width - 16, _TOP - 4, floor, end * factor, f"time, {unit} (estimate)")
    alone = sum(map(len, timeline.spans)) <= _MOST_BOXES
    for rank in range(len(timeline.spans)):
        y = _TOP + (lane + 4) * rank
        body += [words(6, y + lane / 2 + 4, f"pp rank {rank}", size=11)]
        body.append(box(_LEFT, y, timeline.makespan * across, lane, "idle"))
        boxes = list(_merged(timeline, rank, across))
        body += _each(boxes, y, lane, across) if alone else _together(boxes, y, lane, across)
    key, bottom = legend([*_entries(timeline), ("idle", "idle (bubble)")], _LEFT, width - 10, floor + 40)
    return picture(facts, width, bottom + 2, [*body, *key])


def _each(boxes: list[Box], y: float, lane: float, across: float) -> list[str]:
    body = []
    for start, stop, fill, label in boxes:
        x, across_it = _LEFT + start * across, (stop - start) * across
        body.append(box(x, y, across_it, lane, f"{fill} frame", f"{label}: {duration(start)} to {duration(stop)}"))
        number = label[1:]
        if across_it > wide(number, 10) + 2:
            body.append(
                words(x + across_it / 2, y + lane / 2 + 4, number, "middle", "on" if fill == "c0" else "dark", 10)
            )
    return body


def _together(boxes: list[Box], y: float, lane: float, across: float) -> list[str]:
    """One path a colour: a tenth of the bytes, without hints."""
    paths: dict[str, list[str]] = {}
    for start, stop, fill, _ in boxes:
        x, across_it = _LEFT + start * across, (stop - start) * across
        paths.setdefault(fill, []).append(
            f"M{x:.1f} {y:g}h{max(across_it, 0.3):.1f}v{lane:g}h-{max(across_it, 0.3):.1f}z"
        )
    return [f'<path d="{"".join(parts)}" class="{fill} frame"/>' for fill, parts in paths.items()]


def _merged(timeline: Timeline, rank: int, across: float) -> Iterator[Box]:
    """(start, stop, fill, label) of each box of a rank."""
    held: Box | None = None
    own = sorted({action.stage for action, _, _ in timeline.spans[rank]})
    for action, start, stop in timeline.spans[rank]:
        fill = _fill(action.kind, own.index(action.stage), len(own))
        label = f"{action.kind}{action.microbatch}" + (f" of stage {action.stage}" if len(own) > 1 else "")
        thin = held is not None and held[2] == fill and start - held[1] < 1e-12 and (stop - held[0]) * across < _SLIVER
        if held is not None and thin:
            held = held[0], stop, fill, f"{held[3].split(' to ')[0]} to {label}"
            continue
        if held is not None:
            yield held
        held = start, stop, fill, label
    if held is not None:
        yield held


def _fill(kind: str, place: int, places: int) -> str:
    """Later stages of a rank are paler."""
    return _FILLS[kind] + (f" pale{min(3, round(3 * place / (places - 1)))}" if place else "")


def _entries(timeline: Timeline) -> list[tuple[str, str]]:
    kinds = {action.kind for spans in timeline.spans for action, _, _ in spans}
    several = max(len({action.stage for action, _, _ in spans}) for spans in timeline.spans) > 1
    found = [(_FILLS[kind], name) for kind, name in KINDS.items() if kind in kinds]
    return [*found, ("c0 pale3", "paler: later stages of the rank")] if several else found
