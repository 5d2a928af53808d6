"""SVG elements: boxes, lines, text, axes. Colors are CSS classes of the page's style sheet, which has them for light
and dark.

Fills `c0` to `c7` are the palette of Okabe and Ito, which is distinguishable with color vision deficiency.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH = 1040
Point = tuple[float, float]
_CHARACTER_WIDTH = 0.62  # of the font size; an upper estimate of the average


def picture(title: str, width: float, height: float, body: Sequence[str]) -> str:
    """An inline SVG."""
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return "\n".join([f'<svg role="img" aria-label="{escape(title)}" {size}>', *body, "</svg>"])


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


# -- number format ---------------------------------------------------------------------------------------------------
# Figures as text: three digits and a unit. Bytes are decimal (1 GB = 10^9 bytes), as in data sheets.


UNITS = "GB, MB, kB are 10^9, 10^6, 10^3 bytes"


def amount(value: float) -> str:
    """Bytes: amount(65_103_972_992) is '65.1 GB'."""
    return _scaled(value, (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12), ("PB", 1e15)))


def duration(seconds: float) -> str:
    """Seconds: duration(0.5501) is '550 ms'."""
    return _scaled(seconds, (("us", 1e-6), ("ms", 1e-3), ("s", 1.0))) if seconds else "0 s"


def count(value: float) -> str:
    """Numbers of parameters, with the letters of papers: count(70_553_706_496) is '70.6B'."""
    return _scaled(value, (("", 1.0), ("K", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12))).replace(" ", "")


def operations(value: float) -> str:
    return _scaled(value, (("FLOP", 1.0), ("MFLOP", 1e6), ("GFLOP", 1e9), ("TFLOP", 1e12), ("PFLOP", 1e15)))


def _scaled(value: float, scales: Sequence[tuple[str, float]]) -> str:
    """In the smallest unit that needs at most three digits before the point."""
    unit, scale = next((pair for pair in scales if abs(value) < 999.5 * pair[1]), scales[-1])
    number = value / scale
    if abs(number) >= 999.5 or (scale == 1.0 and unit in ("B", "")):
        return f"{number:,.0f} {unit}"
    return f"{number:#.3g}".rstrip(".") + f" {unit}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"


def times(before: float, after: float) -> str:
    """The ratio of two figures of a comparison: 'x1.5', or 'same', 'new', 'gone'."""
    if before == after:
        return "same"
    if not before:
        return "new"
    if not after:
        return "gone"
    ratio = after / before
    return "same" if abs(ratio - 1) < 5e-4 else f"x{ratio:.3g}"


def shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


# -- stylesheet ------------------------------------------------------------------------------------------------------
# The page's style sheet: light, dark and print. `c0` to `c7` are the palette of Okabe and Ito (see canvas.py).


STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --quiet: #5c5c5c; --back: #ffffff; --soft: #f3f4f6; --rule: #d9dbe0;
  --c0: #0072b2; --c1: #e69f00; --c2: #009e73; --c3: #cc79a7; --c4: #56b4e9; --c5: #d55e00; --c6: #8a8a8a; --c7: #b5a400;
  --warn: #b03a00; --good: #00704f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --quiet: #a8a8a8; --back: #16181c; --soft: #23262c;
  --rule: #3a3e46; --c0: #1f6fc4; --c4: #8fd0f7; --warn: #ff9a66; --good: #4cc79c; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 Helvetica, Arial, sans-serif; color: var(--ink); background: var(--back); max-width: 1100px;
  margin: 0 auto; padding: 24px 28px 48px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 8px; border-bottom: 1px solid var(--rule); padding-bottom: 4px; }
h3 { font-size: 15px; margin: 18px 0 4px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
code { font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
.note, figcaption, footer p { color: var(--quiet); font-size: 13px; }
.tag { font-size: 11px; font-weight: normal; border: 1px solid currentColor; border-radius: 8px; padding: 0 6px; color: var(--warn);
  white-space: nowrap; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 10px; margin: 16px 0; }
.card { background: var(--soft); border-radius: 8px; padding: 10px 14px; break-inside: avoid; }
.figure { font-size: 21px; font-weight: bold; overflow-wrap: anywhere; }
.card:first-child .figure { color: var(--good); } .over .card:first-child .figure { color: var(--warn); }
.meter { height: 8px; border-radius: 4px; background: var(--rule); overflow: hidden; margin: 4px 0; }
.meter div { height: 100%; background: var(--good); } .over .meter div { background: var(--warn); }
figure { margin: 14px 0; } figcaption { margin-bottom: 4px; }
.scroll { overflow-x: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: 8px 10px; }
table { border-collapse: collapse; font-size: 13px; margin: 6px 0 10px; }
th, td { text-align: left; padding: 3px 12px 3px 0; vertical-align: top; border-bottom: 1px solid var(--rule); }
th { color: var(--quiet); font-weight: normal; } .n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.part { padding-left: 16px; }
summary { cursor: pointer; margin: 6px 0; }
svg { display: block; } figure > svg, .scroll > svg[width="1040"] { max-width: 100%; height: auto; }
.tiles svg { background: var(--soft); border-radius: 6px; }
svg text { font-family: Helvetica, Arial, sans-serif; fill: var(--ink); }
svg .quiet { fill: var(--quiet); } svg .title { font-weight: bold; } svg .warn { fill: var(--warn); } svg .on { fill: #ffffff; } svg .dark { fill: #1c1c1c; }
svg .halo { paint-order: stroke; stroke: var(--back); stroke-width: 3px; stroke-linejoin: round; }
.c0 { fill: var(--c0); } .c1 { fill: var(--c1); } .c2 { fill: var(--c2); } .c3 { fill: var(--c3); } .c4 { fill: var(--c4); }
.c5 { fill: var(--c5); } .c6 { fill: var(--c6); } .c7 { fill: var(--c7); }
.pale1 { fill-opacity: 0.75; } .pale2 { fill-opacity: 0.58; } .pale3 { fill-opacity: 0.42; }
.idle { fill: var(--soft); stroke: var(--rule); stroke-width: 0.5px; } .empty { fill: var(--back); }
.frame { stroke: var(--back); stroke-width: 0.6px; }
.grid { stroke: var(--rule); stroke-width: 1px; } .limit { stroke: var(--warn); stroke-width: 1.5px; stroke-dasharray: 6 4; }
.under { stroke: var(--back); stroke-width: 4px; }
.outline { fill: none; stroke: var(--ink); stroke-width: 1px; } .cut { stroke: var(--quiet); stroke-width: 0.6px; }
.edge { stroke: var(--ink); stroke-width: 1.6px; } .dot { fill: var(--warn); stroke: var(--back); stroke-width: 1px; }
@media print { :root { --ink: #000000; --quiet: #444444; --back: #ffffff; --soft: #f3f4f6; --rule: #cccccc; --c0: #0072b2; --c4: #56b4e9; --warn: #b03a00;
  --good: #00704f; } body { max-width: none; padding: 0; font-size: 12px; } .scroll { overflow: visible; }
  .scroll > svg { max-width: 100%; height: auto; } .frame { stroke-width: 0.2px; } h2, h3 { break-after: avoid; } figure, tr { break-inside: avoid; }
  svg, .meter div { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  details::details-content { display: block; content-visibility: visible; } }
"""  # noqa: E501
