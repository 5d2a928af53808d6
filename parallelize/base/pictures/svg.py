"""SVG elements: boxes, lines, text, axes. Colors are CSS classes of the style sheet, which has them for light and dark.

Fills `c0` to `c7` are the palette of Okabe and Ito, which is distinguishable with color vision deficiency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from parallelize.base.pictures.stylesheet import PICTURE_STYLE

WIDTH = 1040
Point = tuple[float, float]
_CHARACTER_WIDTH = 0.62  # of the font size; an upper estimate of the average


def picture(title: str, width: float, height: float, body: Sequence[str]) -> str:
    """An inline SVG."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return "\n".join([f'<svg role="img" aria-label="{escape(title)}" {size}>', *body, "</svg>"])


def standalone(svg: str) -> str:
    """A `picture` as a file of its own, with the styles that it has in a page."""
    head, _, rest = svg.partition(">")
    background = '<rect width="100%" height="100%" class="empty"/>'
    return f'{head} xmlns="http://www.w3.org/2000/svg">\n<style>{PICTURE_STYLE}</style>\n{background}{rest}\n'


def box(x: float, y: float, width: float, height: float, fill: str, hint: str = "") -> str:
    """A rectangle. hint: its tooltip."""
    attributes = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" class="{fill}"'
    return f"<rect {attributes}><title>{escape(hint)}</title></rect>" if hint else f"<rect {attributes}/>"


def line(start: Point, stop: Point, style: str = "grid") -> str:
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{stop[0]:.1f}" y2="{stop[1]:.1f}" class="{style}"/>'


def polygon(points: Sequence[Point], fill: str, hint: str = "") -> str:
    """hint: the polygon's tooltip."""
    tooltip = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{fill}">{tooltip}</polygon>'


def text_at(x: float, y: float, text: str, anchor: str = "start", style: str = "", size: int = 12) -> str:
    css_class = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{css_class}>{escape(text)}</text>'


def text_width(text: str, size: int = 12) -> float:
    """An upper estimate of the width of a drawn text."""
    return _CHARACTER_WIDTH * size * len(text)


def shortened(text: str, width: float, size: int = 12) -> str:
    """The text, without its middle where it is wider than `width`."""
    max_length = max(3, int(width / (_CHARACTER_WIDTH * size)))
    if len(text) <= max_length:
        return text
    tail = (max_length - 1) * 2 // 3
    return text[: max_length - 1 - tail] + "…" + text[len(text) - tail :]


def ticks(end: float, most: int) -> list[float]:
    """Round numbers from 0 to `end`, with at most `most` steps."""
    if end <= 0:
        return [0.0]
    step = 10.0 ** math.floor(math.log10(end / most))
    step = next(step * factor for factor in (1, 2, 5, 10, 20) if end / (step * factor) <= most)
    return [n * step for n in range(math.floor(end / step + 1e-9) + 1)]


def axis_below(left: float, right: float, top: float, floor: float, end: float, label: str) -> list[str]:
    """Vertical grid lines with numbers under them, and the name of the axis at its right end."""
    body = []
    for value in ticks(end, round((right - left) / 90)):
        x = left + (right - left) * value / end if end else left
        body += [line((x, top), (x, floor)), text_at(x, floor + 14, f"{value:g}", "middle", "quiet", 11)]
    return [*body, text_at(right, floor + 29, label, "end", "quiet", 11)]


def axis_left(left: float, right: float, y_of: Callable[[float], float], end: float, label: str) -> list[str]:
    """Horizontal grid lines with numbers before them, and the name of the axis above."""
    body = []
    for value in ticks(end, 5):
        y = y_of(value)
        body += [line((left, y), (right, y)), text_at(left - 6, y + 4, f"{value:g}", "end", "quiet", 11)]
    return [*body, text_at(6, y_of(end) - 8, label, "start", "quiet", 11)]


def legend(entries: Sequence[tuple[str, str]], left: float, right: float, top: float) -> tuple[list[str], float]:
    """(colored squares with names, in as many rows as they need; the y at which the rows end). entries: (fill,
    name)."""
    body, x, y = [], left, top
    for fill, name in entries:
        width = 20 + text_width(name, 11) + 14
        if x > left and x + width > right:
            x, y = left, y + 18
        body += [box(x, y, 12, 12, fill), text_at(x + 17, y + 10, name, size=11)]
        x += width
    return body, y + 18


def time_scale(end_s: float) -> tuple[float, str]:
    """(factor, unit) that give an axis in seconds readable numbers."""
    return (1.0, "s") if end_s >= 2 else (1e3, "ms") if end_s >= 2e-3 else (1e6, "us")


def bytes_scale(end: float) -> tuple[float, str]:
    """(factor, unit) that give an axis in bytes readable numbers."""
    scales = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next(((1 / scale, unit) for scale, unit in scales if end >= scale), (1.0, "bytes"))
