"""Pictures of parameters: the whole matrix in proportion, cut as `tp` cuts it, the first rank's part filled."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from parallelize.analysis.explanation import Explanation, ParameterLine
from parallelize.analysis.pictures.canvas import box, cut, line, picture, words
from parallelize.analysis.pictures.tables import name_of
from parallelize.analysis.pictures.words import shape

_WIDTH, _HEIGHT, _WIDE, _HIGH, _LEAST = 250, 186, 180.0, 96.0, 12.0


def draw_shards(explanation: Explanation) -> tuple[list[str], list[str]]:
    """(pictures, names of vectors that are whole on every rank, which need none)."""
    drawn = [one for one in explanation.parameters if len(one.full) > 1 or one.dim is not None]
    whole = [name_of(one) for one in explanation.parameters if one not in drawn]
    return [draw_parameter(one, explanation.mesh.get("tp", 1)) for one in drawn], whole


def draw_parameter(one: ParameterLine, ranks: int) -> str:
    """dim 0 goes down, the other dims go across; a vector lies flat."""
    rows, columns = (one.full[0], prod(one.full[1:])) if len(one.full) > 1 else (1, one.full[0])
    scale = min(_WIDE / max(columns, 1), _HIGH / max(rows, 1))
    wide, high = max(columns * scale, _LEAST), max(rows * scale, _LEAST)
    left, top = 12.0, 44.0
    title = f"{name_of(one)}: {shape(one.full)}, {one.lies}"
    short = name_of(one).rpartition(".*.")[2]  # what equal layers share is in the table
    body = [words(8, 16, cut(short, _WIDTH - 12, 11), style="title", size=11)]
    body += [words(8, 32, cut(f"{shape(one.full)}, {one.style or 'no rule'}", _WIDTH - 12, 10), style="quiet", size=10)]
    body.append(box(left, top, wide, high, "c0" if one.dim is None else "empty", title))
    note = (
        f"whole on each rank ({one.lies})" if one.dim is None else f"rank 0 of {ranks}: {shape(one.local)}, {one.lies}"
    )
    if one.dim is not None:
        down = one.dim == 0 and len(one.full) > 1
        body += _pieces(one, one.dim, (left, top, wide, high), down)
    body.append(box(left, top, wide, high, "outline"))
    tail = [words(8, top + high + 16, cut(note, _WIDTH - 12, 10), size=10)]
    return picture(title, _WIDTH, _HEIGHT, [*body, *tail])


def _pieces(one: ParameterLine, dim: int, place: Sequence[float], down: bool) -> list[str]:
    """The first rank's intervals, and where those of others begin."""
    left, top, wide, high = place
    unit = (high if down else wide) / max(one.full[dim], 1)
    body = []
    for start, stop in one.owned[0]:
        at, length = start * unit, (stop - start) * unit
        filled = (left, top + at, wide, length) if down else (left + at, top, length, high)
        body.append(box(*filled, "c0", f"{shape(one.local)} on the first rank"))
    spots = {start for owned in one.owned for start, _ in owned}
    chunks = {start for start, _ in one.owned[0]}
    for spot in sorted(spots - {0}):
        body.append(_cut(place, spot * unit, down, "edge" if spot in chunks else "cut"))
    return body


def _cut(place: Sequence[float], spot: float, down: bool, style: str) -> str:
    left, top, wide, high = place
    if down:
        return line((left, top + spot), (left + wide, top + spot), style)
    return line((left + spot, top), (left + spot, top + high), style)
