"""The picture of `benchmarks.blind`: estimated over measured step time, both logarithmic, a color for each source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.blind_score import Predicted, by_source
from benchmarks.svg import FILLS
from parallelize.base.pictures.svg import box, line, picture, standalone, text_at

_WIDTH, _HEIGHT, _LEFT, _TOP, _SIDE = 860, 540, 70, 46, 430


def draw(path: Path, rows: Sequence[Predicted]) -> None:
    """rows: those whose time was measured are drawn."""
    timed = [row for row in rows if row.case.measured_s]
    values = [value for row in timed for value in (row.step_s, row.case.measured_s or row.step_s)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    scale = _SIDE / max(high - low, 1)

    def x_of(seconds: float) -> float:
        return _LEFT + (math.log10(seconds) - low) * scale

    def y_of(seconds: float) -> float:
        return _TOP + _SIDE - (math.log10(seconds) - low) * scale

    body = [text_at(_LEFT, 22, "Step time: estimated over measured", style="title")]
    for power in range(low, high + 1):
        value = 10.0**power
        body += [
            line((x_of(value), _TOP), (x_of(value), _TOP + _SIDE)),
            line((_LEFT, y_of(value)), (_LEFT + _SIDE, y_of(value))),
            text_at(x_of(value), _TOP + _SIDE + 18, f"{value:g} s", "middle"),
            text_at(_LEFT - 8, y_of(value) + 4, f"{value:g} s", "end"),
        ]
    body.append(line((x_of(10.0**low), y_of(10.0**low)), (x_of(10.0**high), y_of(10.0**high))))
    body.append(text_at(_LEFT + _SIDE / 2, _HEIGHT - 12, "measured", "middle"))
    for index, (name, some) in enumerate(sorted(by_source(timed).items())):
        fill, y = FILLS[index % len(FILLS)], _TOP + 18 * index
        for row in some:
            assert row.case.measured_s is not None
            body.append(box(x_of(row.case.measured_s) - 2.5, y_of(row.step_s) - 2.5, 5, 5, f"{fill} pale1"))
        body += [
            box(_LEFT + _SIDE + 20, y, 10, 10, fill),
            text_at(_LEFT + _SIDE + 36, y + 9, f"{name[:44]} ({len(some)})"),
        ]
    path.write_text(standalone(picture("Estimated over measured step time", _WIDTH, _HEIGHT, body)))
