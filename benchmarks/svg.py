"""Small figures without a plotting package: points over a logarithmic axis, and lanes of intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

COLORS = ("#1b6ca8", "#c4501b", "#3c8d40", "#8a5fb0", "#8f8f8f", "#b8860b")
_FONT = 'font-family="sans-serif" font-size="12"'


def points(
    path: Path, title: str, x_label: str, y_label: str, series: dict[str, Sequence[tuple[float, float]]]
) -> None:
    """Each series as dots; x logarithmic, y from 0 to at least 1."""
    width, height, left, top, right, bottom = 720, 420, 60, 40, 170, 50
    xs = [x for values in series.values() for x, _ in values]
    low, high = math.floor(math.log2(min(xs))), math.ceil(math.log2(max(xs)))
    high = max(high, low + 1)
    highest = max(1.05, *(y for values in series.values() for _, y in values))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low) / (high - low)
        return left + across * (width - left - right), height - bottom - y / highest * (height - top - bottom)

    body = [f'<text x="{left}" y="22" {_FONT} font-weight="bold">{title}</text>']
    for power in range(low, high + 1):
        x, y = at(2.0**power, 0)
        body.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        label = f"{2**power}" if power >= 0 else f"1/{2**-power}"
        body.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle" {_FONT}>{label}</text>')
    for step in range(int(highest * 5) + 1):
        x, y = at(2.0**low, step / 5)
        body.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{width - right}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        body.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end" {_FONT}>{step / 5:.1f}</text>')
    middle = (left + width - right) / 2
    body.append(f'<text x="{middle}" y="{height - 10}" text-anchor="middle" {_FONT}>{x_label}</text>')
    body.append(
        f'<text x="16" y="{height / 2}" text-anchor="middle" transform="rotate(-90 16 {height / 2})" '
        f"{_FONT}>{y_label}</text>"
    )
    for index, (name, values) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        dots = [at(x, y) for x, y in sorted(values)]
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}" fill-opacity="0.75"/>' for x, y in dots]
        y = top + 10 + 18 * index
        body.append(f'<rect x="{width - right + 14}" y="{y}" width="10" height="10" fill="{color}"/>')
        body.append(f'<text x="{width - right + 30}" y="{y + 9}" {_FONT}>{name}</text>')
    _write(path, width, height, body)


def lanes(path: Path, title: str, rows: Sequence[tuple[str, Sequence[tuple[float, float, str, str]]]]) -> None:
    """Rows of (name, [(start, stop, label, kind)]) over milliseconds; each kind has a color."""
    width, left, top, row_height = 860, 130, 44, 30
    end = max(stop for _, spans in rows for _, stop, _, _ in spans)
    kinds = list(dict.fromkeys(kind for _, spans in rows for *_, kind in spans))
    height = top + row_height * len(rows) + 58
    scale = (width - left - 20) / end
    body = [f'<text x="12" y="20" {_FONT} font-weight="bold">{title}</text>']
    tick = _tick(end)
    for n in range(int(end / tick) + 1):
        x = left + n * tick * scale
        body.append(f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{height - 44}" stroke="#e4e4e4"/>')
        body.append(f'<text x="{x:.1f}" y="{height - 28}" text-anchor="middle" {_FONT}>{n * tick:g} ms</text>')
    for index, (name, spans) in enumerate(rows):
        y = top + row_height * index
        body.append(f'<text x="12" y="{y + 16}" {_FONT}>{name}</text>')
        for start, stop, label, kind in spans:
            x, span_width = left + start * scale, max(1.0, (stop - start) * scale)
            color = COLORS[kinds.index(kind) % len(COLORS)]
            edge = ' stroke="white"' if span_width > 4 else ""  # which would hide a narrow span
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{span_width:.1f}" height="{row_height - 8}" fill="{color}"{edge}/>'
            )
            if span_width > 8 * len(label):
                body.append(
                    f'<text x="{x + span_width / 2:.1f}" y="{y + 15}" text-anchor="middle" {_FONT} '
                    f'fill="white">{label}</text>'
                )
    for index, kind in enumerate(kinds):
        x = left + 200 * index
        body.append(f'<rect x="{x}" y="{height - 16}" width="10" height="10" fill="{COLORS[index % len(COLORS)]}"/>')
        body.append(f'<text x="{x + 16}" y="{height - 7}" {_FONT}>{kind}</text>')
    _write(path, width, height, body)


def _tick(end: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that leaves at most ten labels."""
    power = 10.0 ** math.floor(math.log10(end / 10))
    return next(power * step for step in (1, 2, 5, 10) if end / (power * step) <= 10)


def _write(path: Path, width: float, height: float, body: list[str]) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    path.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>"]) + "\n")
