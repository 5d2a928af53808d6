"""Layouts, shapes and tables as text."""

from __future__ import annotations

from collections.abc import Sequence

from parallelize.base.layout import Layout
from parallelize.plan.resolved import ParameterRow


def _layout_text(layout: Layout, partial: bool) -> str:
    """The layout of a parameter over tp, in words."""
    if layout.dim is None:
        return "replicated, gradient summed" if partial else "replicated"
    dims = layout.sharded_dims
    text = f"dim {dims[0]}" if len(dims) == 1 else "dims " + " and ".join(map(str, dims))
    num_chunks = max(len(owned) for owned in layout.owned)
    if num_chunks > 1:
        text += f", {num_chunks} chunks"
    if any(layout.shared(rank) for rank in range(layout.num_ranks)):
        text += ", some stored by several ranks"
    return text


def row_text(row: ParameterRow) -> str:
    """The layout of a parameter over `tp`, or over the ranks that experts are folded over, in words."""
    over = (", over ep and etp" if row.layout.rows else ", over ep") if row.axis == "ep" else ""
    return "plain" if row.plain else _layout_text(row.layout, row.partial) + over


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table: header, rule and rows, in aligned columns."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
