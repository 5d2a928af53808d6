"""Pictures of memory: a rank's step as areas over time, and the parts of each rank's peak."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from parallelize.base.pictures.svg import (
    WIDTH,
    axis_below,
    axis_left,
    box,
    bytes_scale,
    legend,
    line,
    picture,
    polygon,
    shortened,
    text_at,
    text_width,
    time_scale,
)
from parallelize.base.terminal.numbers import amount, percent
from parallelize.tools.analysis.cost.memory import Moment
from parallelize.tools.analysis.show.explanation import Explanation, RankReport
from parallelize.tools.analysis.show.tables import PART_NAMES, parts_of, rank_name

FILLS = ("c0", "c1", "c2", "c3", "c4")  # of PART_NAMES
_LEFT, _RIGHT, _TOP, _HEIGHT = 58.0, WIDTH - 16.0, 46.0, 190.0
_MAX_RUNS = 240
_LIMIT_FRACTION = 0.4  # the machine's memory is drawn where the peak is at least this fraction of it


class TimedMoment(NamedTuple):
    """A moment with its time in the step. An action's moments are spread evenly, because their times are not known."""

    start: float
    stop: float
    moment: Moment


def timed_moments(explanation: Explanation, rank: RankReport) -> list[TimedMoment]:
    """The moments of a rank with the times of the estimated pipeline; at 0, 1, 2, ... where it does not have their
    actions."""
    moments = rank.memory.moments
    spans = {str(action): (start, stop) for action, start, stop in explanation.time.timeline.spans[rank.pp_rank]}
    if any(moment.action not in spans for moment in moments):
        return [TimedMoment(n, n + 1, moment) for n, moment in enumerate(moments)]
    counts = Counter(moment.action for moment in moments)
    num_placed: Counter[str] = Counter()
    timed = []
    for moment in moments:
        start, stop = spans[moment.action]
        duration = (stop - start) / counts[moment.action]
        begin = start + num_placed[moment.action] * duration
        num_placed[moment.action] += 1
        timed.append(TimedMoment(begin, begin + duration, moment))
    return timed


def scale_of(*explanations: Explanation) -> float:
    """The top of the memory axis for all ranks. It includes the machine's memory where the peak comes near it."""
    peak = max(explanation.peak_bytes for explanation in explanations)
    machine = max(explanation.machine_memory_bytes for explanation in explanations)
    return 1.06 * (max(peak, machine) if peak > _LIMIT_FRACTION * machine else peak)


def draw_step(explanation: Explanation, rank: RankReport, top: float) -> str:
    """One rank's memory over the step. top: bytes at the upper edge, the same for all ranks of a page."""
    parts, end = parts_of(rank.memory), explanation.time.timeline.makespan or 1.0
    floor = _TOP + _HEIGHT
    across = (_RIGHT - _LEFT) / end  # units of the picture per second

    def y_of(size: float) -> float:
        return floor - size / top * _HEIGHT

    factor, unit = bytes_scale(top)
    body = axis_left(_LEFT, _RIGHT, lambda value: y_of(value / factor), top * factor, f"memory, {unit}")
    constant = 0.0
    for name, fill, size in zip(PART_NAMES, FILLS, parts[:-1], strict=False):
        if size:
            corners = ((_LEFT, constant), (_RIGHT, constant), (_RIGHT, constant + size), (_LEFT, constant + size))
            body.append(polygon([(x, y_of(size)) for x, size in corners], fill, f"{name}: {amount(size)}"))
        constant += size
    runs = _runs(timed_moments(explanation, rank))
    outline = [(_LEFT + time * across, y_of(constant + size)) for time, size in _outline(runs)]
    if outline:
        hint = f"{PART_NAMES[-1]}: at most {amount(parts.moving)}"
        below = y_of(constant)
        body.append(polygon([(outline[0][0], below), *outline, (outline[-1][0], below)], FILLS[-1], hint))
    body += _limit(explanation, top, y_of)
    body += _peak(rank, runs, across, y_of)
    factor, unit = time_scale(end)
    label = f"time of the step before the optimizer, {unit} (estimate)"
    body += axis_below(_LEFT, _RIGHT, _TOP, floor, end * factor, label)
    title = f"{rank_name(explanation, rank)}: memory over one step, {rank.units}"
    heading = text_at(6, 18, shortened(title, _RIGHT, 13), style="title", size=13)
    return picture(title, WIDTH, floor + 36, [heading, *body])


def key() -> str:
    """The legend of all pictures of memory."""
    entries = list(zip(FILLS, PART_NAMES, strict=True))
    body, bottom = legend(entries, 6, _RIGHT, 4)
    return picture("colors of the parts of memory", WIDTH, bottom, body)


def _runs(moments: Sequence[TimedMoment]) -> list[Sequence[TimedMoment]]:
    """At most `_MAX_RUNS` runs of neighbors, each of which is drawn as one moment."""
    step = max(1.0, len(moments) / _MAX_RUNS)
    bounds = [round(n * step) for n in range(round(len(moments) / step))] + [len(moments)]
    return [moments[start:stop] for start, stop in itertools.pairwise(bounds) if stop > start]


def _outline(runs: Sequence[Sequence[TimedMoment]]) -> list[tuple[float, float]]:
    """(time, bytes) of the upper edge. Each run has three points: its start, its highest peak, and its end."""
    points: list[tuple[float, float]] = []
    for run in runs:
        highest = max(run, key=lambda timed: timed.moment.peak)
        middle = (highest.start + highest.stop) / 2
        points += [
            (run[0].start, run[0].moment.before),
            (middle, highest.moment.peak),
            (run[-1].stop, run[-1].moment.after),
        ]
    return points


def _limit(explanation: Explanation, top: float, y_of: Callable[[float], float]) -> list[str]:
    """The machine's memory: a line, or a note where it is above the picture."""
    limit = explanation.machine_memory_bytes
    text = f"memory of {explanation.machine}: {amount(limit)}"
    if limit > top:
        return [text_at(_RIGHT, _TOP - 8, f"{text}, far above", "end", "quiet", 11)]
    y = y_of(limit)
    lines = [line((_LEFT, y), (_RIGHT, y), style) for style in ("under", "limit")]
    return [*lines, text_at(_RIGHT, y - 6, text, "end", "warn halo", 11)]


def _peak(
    rank: RankReport, runs: Sequence[Sequence[TimedMoment]], across: float, y_of: Callable[[float], float]
) -> list[str]:
    """A dot at the peak, with its action and unit."""
    memory = rank.memory
    if not runs:
        return []
    highest = max((timed for run in runs for timed in run), key=lambda timed: timed.moment.peak)
    x, y = _LEFT + (highest.start + highest.stop) / 2 * across, y_of(memory.peak)
    text = shortened(f"peak {amount(memory.peak)}: {memory.peak_at}", (_RIGHT - _LEFT) / 2)
    right = x + 8 + text_width(text) < _RIGHT
    label = text_at(x + 8 if right else x - 8, max(y - 4, _TOP + 10), text, "start" if right else "end", "halo")
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="dot"/>', label]


def draw_parts(named: Sequence[tuple[str, Explanation, RankReport]]) -> str:
    """A bar per rank, as long as its peak. named: (name, explanation, rank)."""
    left = min(260.0, max(text_width(name) for name, _, _ in named) + 16)
    end = scale_of(*(explanation for _, explanation, _ in named))
    right = _RIGHT - 190
    across, floor = (right - left) / end, 8 + 30.0 * len(named)
    factor, unit = bytes_scale(end)
    body = axis_below(left, right, 4, floor, end * factor, f"bytes at the peak, {unit}")
    for row, (name, explanation, rank) in enumerate(named):
        y, x = 10 + 30.0 * row, left
        body.append(text_at(6, y + 14, shortened(name, left - 10)))
        for part, fill, size in zip(PART_NAMES, FILLS, parts_of(rank.memory), strict=True):
            if size:
                body.append(box(x, y, size * across, 20, fill, f"{name}, {part}: {amount(size)}"))
            x += size * across
        fraction = percent(rank.memory.peak / explanation.machine_memory_bytes)
        limit_x = left + explanation.machine_memory_bytes * across
        if limit_x <= right:
            body += [line((limit_x, y - 4), (limit_x, y + 24), style) for style in ("under", "limit")]
        body.append(text_at(x + 6, y + 14, f"{amount(rank.memory.peak)}, {fraction} of memory", style="halo"))
    return picture("memory of each rank at its peak", WIDTH, floor + 36, body)
