"""Pictures of a page: a pipeline's step, a lane per rank, and where the shards of a weight lie.

Very narrow neighbors are merged. Many boxes are drawn as one path per color.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from parallelize.axes.pipeline.timeline import Timeline
from parallelize.base.pictures.svg import (
    WIDTH,
    Point,
    axis_below,
    box,
    legend,
    line,
    picture,
    shortened,
    text_at,
    text_width,
    time_scale,
)
from parallelize.base.terminal.numbers import duration, percent, shape
from parallelize.tools.analysis.show.explanation import Explanation, ParameterLine
from parallelize.tools.analysis.show.tables import name_of

KINDS = {"F": "forward", "B": "backward", "I": "backward, dgrad", "W": "backward, wgrad"}
_FILLS = {"F": "c0", "B": "c1", "I": "c2", "W": "c3"}
_LEFT, _TOP = 76.0, 30.0
_MAX_BOXES = 1200  # that are drawn one by one, with a tooltip each
_MIN_BOX_WIDTH = 1.2  # in units of the picture; narrower neighbors of one color are merged

Bar = tuple[float, float, str, str]  # start, stop, fill, label


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


def _separate_boxes(boxes: list[Bar], y: float, lane: float, across: float) -> list[str]:
    body = []
    for start, stop, fill, label in boxes:
        x, width = _LEFT + start * across, (stop - start) * across
        body.append(box(x, y, width, lane, f"{fill} frame", f"{label}: {duration(start)} to {duration(stop)}"))
        number = label[1:]
        if width > text_width(number, 10) + 2:
            style = "on" if fill == "c0" else "dark"
            body.append(text_at(x + width / 2, y + lane / 2 + 4, number, "middle", style, 10))
    return body


def _paths(boxes: list[Bar], y: float, lane: float, across: float) -> list[str]:
    """One path per color: a tenth of the bytes, without tooltips."""
    paths: dict[str, list[str]] = {}
    for start, stop, fill, _ in boxes:
        x, width = _LEFT + start * across, max((stop - start) * across, 0.3)
        paths.setdefault(fill, []).append(f"M{x:.1f} {y:g}h{width:.1f}v{lane:g}h-{width:.1f}z")
    return [f'<path d="{"".join(parts)}" class="{fill} frame"/>' for fill, parts in paths.items()]


def _merged(timeline: Timeline, rank: int, across: float) -> Iterator[Bar]:
    """The boxes of a rank. across: units of the picture per second."""
    previous: Bar | None = None
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


def _can_merge(first: Bar, second: Bar, across: float) -> bool:
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


# -- shard chart -----------------------------------------------------------------------------------------------------
# Pictures of parameters: the full matrix in proportion, split as over `tp`, with the first rank's shard filled.


_WIDTH, _HEIGHT = 250, 186  # of a picture
_MAX_MATRIX_WIDTH, _MAX_MATRIX_HEIGHT, _MIN_MATRIX_SIDE = 180.0, 96.0, 12.0


@dataclass(frozen=True)
class _Matrix:
    """Where a matrix is drawn. rows_split: tp splits dim 0, which goes down; else the dims that go across."""

    left: float
    top: float
    width: float
    height: float
    rows_split: bool

    def band(self, start: float, length: float) -> tuple[float, float, float, float]:
        """(x, y, width, height) of an interval of the split dim."""
        if self.rows_split:
            return self.left, self.top + start, self.width, length
        return self.left + start, self.top, length, self.height

    def edge(self, position: float) -> tuple[Point, Point]:
        """The line between two intervals."""
        x, y, width, height = self.band(position, 0.0)
        return (x, y), (x + width, y + height)


def draw_shards(explanation: Explanation) -> tuple[list[str], list[str]]:
    """(pictures, names of replicated vectors, which are not drawn)."""
    lines = explanation.parameters
    drawn = [line for line in lines if len(line.full) > 1 or line.dim is not None]
    replicated = [name_of(line) for line in lines if line not in drawn]
    return [draw_parameter(line, explanation.mesh.get("tp", 1)) for line in drawn], replicated


def draw_parameter(parameter: ParameterLine, ranks: int) -> str:
    """dim 0 goes down, and the other dims go across. A vector is one row."""
    full, dim = parameter.full, parameter.dim
    rows, columns = (full[0], prod(full[1:])) if len(full) > 1 else (1, full[0])
    scale = min(_MAX_MATRIX_WIDTH / max(columns, 1), _MAX_MATRIX_HEIGHT / max(rows, 1))
    width, height = max(columns * scale, _MIN_MATRIX_SIDE), max(rows * scale, _MIN_MATRIX_SIDE)
    matrix = _Matrix(12.0, 44.0, width, height, rows_split=dim == 0 and len(full) > 1)
    outer = (matrix.left, matrix.top, matrix.width, matrix.height)
    title = f"{name_of(parameter)}: {shape(full)}, {parameter.lies}"
    short_name = name_of(parameter).rpartition(".*.")[2]  # the table has the prefix of equal layers
    about = f"{shape(full)}, {parameter.style or 'no rule'}"
    body = [text_at(8, 16, shortened(short_name, _WIDTH - 12, 11), style="title", size=11)]
    body += [text_at(8, 32, shortened(about, _WIDTH - 12, 10), style="quiet", size=10)]
    if dim is None:
        note = f"full on each rank ({parameter.lies})"
        body.append(box(*outer, "c0", title))
    else:
        note = f"rank 0 of {ranks}: {shape(parameter.local)}, {parameter.lies}"
        body.append(box(*outer, "empty", title))
        body += _shards(parameter, dim, matrix)
    body.append(box(*outer, "outline"))
    tail = [text_at(8, matrix.top + height + 16, shortened(note, _WIDTH - 12, 10), size=10)]
    return picture(title, _WIDTH, _HEIGHT, [*body, *tail])


def _shards(parameter: ParameterLine, dim: int, matrix: _Matrix) -> list[str]:
    """The first rank's intervals, and lines where those of other ranks begin."""
    unit = (matrix.height if matrix.rows_split else matrix.width) / max(parameter.full[dim], 1)
    body = []
    for start, stop in parameter.owned[0]:
        hint = f"{shape(parameter.local)} on the first rank"
        body.append(box(*matrix.band(start * unit, (stop - start) * unit), "c0", hint))
    starts = {start for owned in parameter.owned for start, _ in owned}
    chunk_starts = {start for start, _ in parameter.owned[0]}
    for start in sorted(starts - {0}):
        body.append(line(*matrix.edge(start * unit), "edge" if start in chunk_starts else "cut"))
    return body
