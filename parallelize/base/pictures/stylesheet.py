"""One style sheet for pages and pictures: light, dark and print.

A page has its colors as variables, which the schemes set. A picture in a file of its own may be shown by programs that
know no variables and no schemes, so that its rules name the light colors, and browsers replace them in a dark scheme.
"""

from __future__ import annotations

import re

LIGHT = {
    "ink": "#1c1c1c",
    "quiet": "#5c5c5c",
    "back": "#ffffff",
    "soft": "#f3f4f6",
    "rule": "#d9dbe0",
    "c0": "#0072b2",
    "c1": "#e69f00",
    "c2": "#009e73",
    "c3": "#cc79a7",
    "c4": "#56b4e9",
    "c5": "#d55e00",
    "c6": "#8a8a8a",
    "c7": "#b5a400",
    "warn": "#b03a00",
    "good": "#00704f",
}
DARK = {
    **LIGHT,
    "ink": "#e8e8e8",
    "quiet": "#a8a8a8",
    "back": "#16181c",
    "soft": "#23262c",
    "rule": "#3a3e46",
    "c0": "#1f6fc4",
    "c4": "#8fd0f7",
    "warn": "#ff9a66",
    "good": "#4cc79c",
}
PRINT = {**LIGHT, "ink": "#000000", "quiet": "#444444", "rule": "#cccccc"}

_PAGE_RULES = """
* { box-sizing: border-box; }
body { font: 15px/1.5 Helvetica, Arial, sans-serif; color: var(--ink); background: var(--back); max-width: 1100px;
  margin: 0 auto; padding: 24px 28px 48px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 8px; border-bottom: 1px solid var(--rule); padding-bottom: 4px; }
h3 { font-size: 15px; margin: 18px 0 4px; }
p { margin: 6px 0; overflow-wrap: anywhere; }
code { font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
.note, figcaption, footer p { color: var(--quiet); font-size: 13px; }
.tag { font-size: 11px; font-weight: normal; border: 1px solid currentColor; border-radius: 8px; padding: 0 6px;
  color: var(--warn); white-space: nowrap; }
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
th { color: var(--quiet); font-weight: normal; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.part { padding-left: 16px; }
summary { cursor: pointer; margin: 6px 0; }
svg { display: block; } figure > svg, .scroll > svg[width="1040"] { max-width: 100%; height: auto; }
.tiles svg { background: var(--soft); border-radius: 6px; }
"""

_PICTURE_RULES = """
svg text { font-family: Helvetica, Arial, sans-serif; fill: var(--ink); }
svg .quiet { fill: var(--quiet); }
svg .title { font-weight: bold; }
svg .warn { fill: var(--warn); }
svg .on { fill: #ffffff; }
svg .dark { fill: #1c1c1c; }
svg .halo { paint-order: stroke; stroke: var(--back); stroke-width: 3px; stroke-linejoin: round; }
.c0 { fill: var(--c0); }
.c1 { fill: var(--c1); }
.c2 { fill: var(--c2); }
.c3 { fill: var(--c3); }
.c4 { fill: var(--c4); }
.c5 { fill: var(--c5); }
.c6 { fill: var(--c6); }
.c7 { fill: var(--c7); }
.pale1 { fill-opacity: 0.75; }
.pale2 { fill-opacity: 0.58; }
.pale3 { fill-opacity: 0.42; }
.idle { fill: var(--soft); stroke: var(--rule); stroke-width: 0.5px; }
.empty { fill: var(--back); }
.frame { stroke: var(--back); stroke-width: 0.6px; }
.grid { stroke: var(--rule); stroke-width: 1px; }
.limit { stroke: var(--warn); stroke-width: 1.5px; stroke-dasharray: 6 4; }
.under { stroke: var(--back); stroke-width: 4px; }
.outline { fill: none; stroke: var(--ink); stroke-width: 1px; }
.cut { stroke: var(--quiet); stroke-width: 0.6px; }
.edge { stroke: var(--ink); stroke-width: 1.6px; }
.dot { fill: var(--warn); stroke: var(--back); stroke-width: 1px; }
"""

_PRINT_RULES = """
body { max-width: none; padding: 0; font-size: 12px; } .scroll { overflow: visible; }
.scroll > svg { max-width: 100%; height: auto; } .frame { stroke-width: 0.2px; } h2, h3 { break-after: avoid; }
figure, tr { break-inside: avoid; }
svg, .meter div { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
details::details-content { display: block; content-visibility: visible; }
"""


def _variables(colors: dict[str, str]) -> str:
    return ":root { " + " ".join(f"--{name}: {color};" for name, color in colors.items()) + " }"


def _named(rules: str, colors: dict[str, str]) -> str:
    """The rules with colors in the place of variables."""
    return re.sub(r"var\(--(\w+)\)", lambda match: colors[match[1]], rules)


_DARK = "@media (prefers-color-scheme: dark)"
_COLORED = "\n".join(rule for rule in _PICTURE_RULES.splitlines() if "var(" in rule)

PAGE_STYLE = f"""
:root {{ color-scheme: light dark; }}
{_variables(LIGHT)}
{_DARK} {{ {_variables(DARK)} }}
{_PAGE_RULES}{_PICTURE_RULES}
@media print {{ {_variables(PRINT)}{_PRINT_RULES} }}
"""
"""Of a page with its pictures."""

PICTURE_STYLE = f"""
:root {{ color-scheme: light dark; }}{_named(_PICTURE_RULES, LIGHT)}
{_DARK} {{
{_named(_COLORED, DARK)}
}}
"""
"""Of a picture in a file of its own."""
