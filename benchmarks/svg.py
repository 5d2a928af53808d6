"""Figures of benchmarks: points over a logarithmic axis, and lanes of intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from parallelize.base.pictures.svg import axis_below, axis_left, box, line, picture, standalone, text_at, text_width

FILLS = ("c0", "c5", "c2", "c3", "c6", "c1", "c4", "c7")


def points(
    path: Path, title: str, x_label: str, y_label: str, series: dict[str, Sequence[tuple[float, float]]]
) -> None:
    """Each series as dots; x logarithmic, y from 0 to at least 1."""
    width, height, left, top, right, floor = 720, 420, 60, 50, 550, 370
    xs = [x for values in series.values() for x, _ in values]
    low, high = math.floor(math.log2(min(xs))), math.ceil(math.log2(max(xs)))
    high = max(high, low + 1)
    highest = max(1.05, *(y for values in series.values() for _, y in values))

    def x_of(x: float) -> float:
        return left + (math.log2(x) - low) / (high - low) * (right - left)

    def y_of(y: float) -> float:
        return floor - y / highest * (floor - top)

    body = [text_at(left, 22, title, style="title"), *axis_left(left, right, y_of, highest, y_label)]
    for power in range(low, high + 1):
        x = x_of(2.0**power)
        label = f"{2**power}" if power >= 0 else f"1/{2**-power}"
        body += [line((x, top), (x, floor)), text_at(x, floor + 18, label, "middle")]
    body.append(text_at((left + right) / 2, height - 10, x_label, "middle"))
    for index, (name, values) in enumerate(series.items()):
        fill, y = FILLS[index % len(FILLS)], top + 18 * index
        body += [box(x_of(x) - 4, y_of(value) - 4, 8, 8, f"{fill} pale1") for x, value in sorted(values)]
        body += [box(right + 14, y, 10, 10, fill), text_at(right + 30, y + 9, name)]
    path.write_text(standalone(picture(title, width, height, body)))


def lanes(path: Path, title: str, rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]]) -> None:
    """Rows of (name, [(start, stop, label, kind)]) over milliseconds; each kind has a color."""
    width, left, right, top, row_height = 860, 130, 840, 44, 30
    end = max(stop for _, spans in rows for _, stop, _, _ in spans)
    kinds = list(dict.fromkeys(kind for _, spans in rows for *_, kind in spans))
    floor = top + row_height * len(rows)
    height, scale = floor + 62, (right - left) / end
    body = [text_at(12, 20, title, style="title"), *axis_below(left, right, top - 6, floor, end, "ms")]
    for index, (name, spans) in enumerate(rows):
        y = top + row_height * index
        body.append(text_at(12, y + 16, name))
        for start, stop, label, kind in spans:
            x, wide = left + start * scale, max(1.0, (stop - start) * scale)
            frame = " frame" if wide > 4 else ""  # which would hide a narrow span
            body.append(box(x, y, wide, row_height - 8, FILLS[kinds.index(kind) % len(FILLS)] + frame))
            if wide > text_width(label):
                body.append(text_at(x + wide / 2, y + 15, label, "middle", "on"))
    for index, kind in enumerate(kinds):
        x = left + 200 * index
        body += [box(x, height - 20, 10, 10, FILLS[index % len(FILLS)]), text_at(x + 16, height - 11, kind)]
    path.write_text(standalone(picture(title, width, height, body)))
