"""Pictures of memory: a rank's step as areas over time, and what each rank's peak is made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from parallelize.analysis.explanation import Explanation, RankReport
from parallelize.analysis.memory import Moment
from parallelize.analysis.pictures.canvas import (
    WIDTH,
    axis_below,
    axis_left,
    box,
    bytes_scale,
    cut,
    legend,
    line,
    picture,
    polygon,
    time_scale,
    wide,
    words,
)
from parallelize.analysis.pictures.tables import PART_NAMES, parts_of, rank_name
from parallelize.analysis.pictures.words import amount, percent

FILLS = ("c0", "c1", "c2", "c3", "c4")  # of PART_NAMES
_LEFT, _RIGHT, _TOP, _HIGH = 58.0, WIDTH - 16.0, 46.0, 190.0
_MOST_RUNS = 240
_NEAR = 0.4  # machine memory is drawn where the peak comes so near to it


class Timed(NamedTuple):
    """A moment and its place in the step. An action's moments are spread evenly: more is not known."""

    start: float
    stop: float
    moment: Moment


def timed(explanation: Explanation, rank: RankReport) -> list[Timed]:
    """The moments of a rank on the clock of the estimated pipeline, or one after another where they are not on it."""
    moments = rank.memory.moments
    spans = {str(action): (a, b) for action, a, b in explanation.time.timeline.spans[rank.pp_rank]}
    if any(moment.action not in spans for moment in moments):
        return [Timed(n, n + 1, moment) for n, moment in enumerate(moments)]
    counts: dict[str, int] = {}
    for moment in moments:
        counts[moment.action] = counts.get(moment.action, 0) + 1
    found, seen = [], dict.fromkeys(counts, 0)
    for moment in moments:
        start, stop = spans[moment.action]
        each = (stop - start) / counts[moment.action]
        begin = start + seen[moment.action] * each
        seen[moment.action] += 1
        found.append(Timed(begin, begin + each, moment))
    return found


def scale_of(*explanations: Explanation) -> float:
    """The top of the memory axis for all ranks together: machine memory too, where it is not far above."""
    peak = max(explanation.peak_bytes for explanation in explanations)
    machine = max(explanation.machine_memory_bytes for explanation in explanations)
    return 1.06 * (max(peak, machine) if peak > _NEAR * machine else peak)


def draw_step(explanation: Explanation, rank: RankReport, top: float) -> str:
    """One rank's memory over the step; `top`: bytes at the upper edge, the same for all ranks of a page."""
    parts, end = parts_of(rank.memory), explanation.time.timeline.makespan or 1.0
    floor = _TOP + _HIGH
    across = (_RIGHT - _LEFT) / end

    def at(size: float) -> float:
        return floor - size / top * _HIGH

    factor, unit = bytes_scale(top)
    body = axis_left(_LEFT, _RIGHT, lambda value: at(value / factor), top * factor, f"memory, {unit}")
    still = 0.0
    for name, fill, size in zip(PART_NAMES, FILLS, parts[:-1], strict=False):
        if size:
            corners = ((_LEFT, still), (_RIGHT, still), (_RIGHT, still + size), (_LEFT, still + size))
            body.append(polygon([(x, at(size)) for x, size in corners], fill, f"{name}: {amount(size)}"))
        still += size
    runs = _runs(timed(explanation, rank))
    edge = [(_LEFT + time * across, at(still + size)) for time, size in _outline(runs)]
    if edge:
        hint = f"{PART_NAMES[-1]}: at most {amount(parts.moving)}"
        body.append(polygon([(edge[0][0], at(still)), *edge, (edge[-1][0], at(still))], FILLS[-1], hint))
    body += _limit(explanation, top, at)
    body += _peak(rank, runs, across, at)
    factor, unit = time_scale(end)
    body += axis_below(
        _LEFT, _RIGHT, _TOP, floor, end * factor, f"time of the step before the optimiser, {unit} (estimate)"
    )
    title = f"{rank_name(explanation, rank)}: memory over one step, {rank.units}"
    shown = [words(6, 18, cut(title, _RIGHT, 13), style="title", size=13)]
    return picture(title, WIDTH, floor + 36, [*shown, *body])


def key() -> str:
    """The legend of all pictures of memory."""
    entries = list(zip(FILLS, PART_NAMES, strict=True))
    body, bottom = legend(entries, 6, _RIGHT, 4)
    return picture("colours of the parts of memory", WIDTH, bottom, body)


def _runs(moments: Sequence[Timed]) -> list[Sequence[Timed]]:
    """Neighbours that are drawn as one, so that a page stays small."""
    step = max(1.0, len(moments) / _MOST_RUNS)
    cuts = [round(n * step) for n in range(round(len(moments) / step))] + [len(moments)]
    return [moments[a:b] for a, b in itertools.pairwise(cuts) if b > a]


def _outline(runs: Sequence[Sequence[Timed]]) -> list[tuple[float, float]]:
    """(time, bytes): each run from what it found over its highest peak to what it left."""
    points: list[tuple[float, float]] = []
    for run in runs:
        high = max(run, key=lambda one: one.moment.peak)
        middle = (high.start + high.stop) / 2
        points += [
            (run[0].start, run[0].moment.before),
            (middle, high.moment.peak),
            (run[-1].stop, run[-1].moment.after),
        ]
    return points


def _limit(explanation: Explanation, top: float, at: Callable[[float], float]) -> list[str]:
    have = explanation.machine_memory_bytes
    text = f"memory of {explanation.machine}: {amount(have)}"
    if have > top:
        return [words(_RIGHT, _TOP - 8, f"{text}, far above", "end", "quiet", 11)]
    y = at(have)
    both = [line((_LEFT, y), (_RIGHT, y), style) for style in ("under", "limit")]
    return [*both, words(_RIGHT, y - 6, text, "end", "warn halo", 11)]


def _peak(rank: RankReport, runs: Sequence[Sequence[Timed]], across: float, at: Callable[[float], float]) -> list[str]:
    """A dot where the peak is, and what ran there."""
    memory = rank.memory
    if not runs:
        return []
    high = max((one for run in runs for one in run), key=lambda one: one.moment.peak)
    x, y = _LEFT + (high.start + high.stop) / 2 * across, at(memory.peak)
    text = cut(f"peak {amount(memory.peak)}: {memory.peak_at}", (_RIGHT - _LEFT) / 2)
    right = x + 8 + wide(text) < _RIGHT
    place = words(x + 8 if right else x - 8, max(y - 4, _TOP + 10), text, "start" if right else "end", "halo")
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="dot"/>', place]


def draw_parts(named: Sequence[tuple[str, Explanation, RankReport]]) -> str:
    """A bar a rank, as long as its peak."""
    name_room = min(260.0, max(wide(name) for name, _, _ in named) + 16)
    end = scale_of(*(explanation for _, explanation, _ in named))
    right = _RIGHT - 190
    across, floor = (right - name_room) / end, 8 + 30.0 * len(named)
    factor, unit = bytes_scale(end)
    body = axis_below(name_room, right, 4, floor, end * factor, f"bytes at the peak, {unit}")
    for row, (name, explanation, rank) in enumerate(named):
        y, x = 10 + 30.0 * row, name_room
        body.append(words(6, y + 14, cut(name, name_room - 10)))
        for part, fill, size in zip(PART_NAMES, FILLS, parts_of(rank.memory), strict=True):
            if size:
                body.append(box(x, y, size * across, 20, fill, f"{name}, {part}: {amount(size)}"))
            x += size * across
        share = percent(rank.memory.peak / explanation.machine_memory_bytes)
        have = name_room + explanation.machine_memory_bytes * across
        if have <= right:
            body += [line((have, y - 4), (have, y + 24), style) for style in ("under", "limit")]
        body.append(words(x + 6, y + 14, f"{amount(rank.memory.peak)}, {share} of memory", style="halo"))
    return picture("memory of each rank at its peak", WIDTH, floor + 36, body)
