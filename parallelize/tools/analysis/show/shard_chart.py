"""Pictures of parameters: the full matrix in proportion, split as over `tp`, with the first rank's shard filled."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from parallelize.tools.analysis.show.canvas import Point, box, line, picture, shape, shortened, text_at
from parallelize.tools.analysis.show.explanation import Explanation, ParameterLine
from parallelize.tools.analysis.show.tables import name_of

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
