"""A picture of traffic: bytes that a rank sends over each axis in a step, by operation."""

from __future__ import annotations

from collections.abc import Sequence

from parallelize.tools.analysis.show.canvas import (
    WIDTH,
    axis_below,
    box,
    bytes_scale,
    legend,
    picture,
    shortened,
    text_at,
    text_width,
)
from parallelize.tools.analysis.show.explanation import RankReport
from parallelize.tools.analysis.show.number_format import amount, duration, plural

_FILLS = {"all_reduce": "c0", "all_gather": "c1", "reduce_scatter": "c2", "send": "c4", "all_to_all": "c5"}
_OTHER = "c6"


def draw_traffic(named: Sequence[tuple[str, RankReport]]) -> str:
    """Bars of several ranks (or settings) under each axis."""
    axes = list(dict.fromkeys(total.axis for _, rank in named for total in rank.totals))
    rows = [(axis, name, rank) for axis in axes for name, rank in named if _sent(rank, axis)]
    if not rows:
        return ""
    end = max(sum(_sent(rank, axis).values()) for axis, _, rank in rows) * 1.02
    left = min(280.0, max(text_width(f"{axis}, {name}") for axis, name, _ in rows) + 16)
    right, floor = WIDTH - 270.0, 8 + 26.0 * len(rows)
    factor, unit = bytes_scale(end)
    body = axis_below(left, right, 4, floor, end * factor, f"bytes sent in one step, {unit}")
    for row, (axis, name, rank) in enumerate(rows):
        body += _bar(f"{axis}, {name}", rank, axis, y=9 + 26.0 * row, left=left, across=(right - left) / end)
    used = list(dict.fromkeys(op for axis, _, rank in rows for op in _sent(rank, axis)))
    key, bottom = legend([(_FILLS.get(op, _OTHER), op) for op in used], 6, WIDTH - 10, floor + 40)
    return picture("bytes sent over each axis in one step", WIDTH, bottom + 2, [*body, *key])


def _sent(rank: RankReport, axis: str) -> dict[str, float]:
    """operation -> bytes."""
    sizes: dict[str, float] = {}
    for message in rank.messages:
        if message.axis == axis and message.sent_bytes:
            sizes[message.op] = sizes.get(message.op, 0.0) + message.sent_bytes
    return sizes


def _bar(label: str, rank: RankReport, axis: str, *, y: float, left: float, across: float) -> list[str]:
    """across: units of the picture per byte."""
    body, x = [text_at(6, y + 13, shortened(label, left - 10))], left
    for op, size in _sent(rank, axis).items():
        body.append(box(x, y, size * across, 18, _FILLS.get(op, _OTHER), f"{label}, {op}: {amount(size)}"))
        x += size * across
    total = next(total for total in rank.totals if total.axis == axis)
    summary = f"{amount(total.sent_bytes)} in {plural(total.count, 'message')}, about {duration(total.seconds)}"
    return [*body, text_at(x + 6, y + 13, summary, style="halo", size=11)]
