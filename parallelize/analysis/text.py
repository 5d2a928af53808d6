"""An explanation on the terminal: what fits, where every parameter lies, what is sent, about how long a step takes."""

from __future__ import annotations

from textwrap import wrap

from parallelize.analysis.explanation import Explanation, ParameterLine, RankReport
from parallelize.analysis.pictures.tables import (
    SUMMED,
    Table,
    advice_table,
    axis_difference,
    costly_first,
    headline_difference,
    largest,
    layout_difference,
    memory_table,
    message_table,
    parameter_table,
    rank_name,
    ranks_told,
    recompute_told,
    size_told,
    time_parts,
    time_table,
    total_table,
)
from parallelize.analysis.pictures.words import UNITS, amount, percent

WIDTH = 100
MOST_MESSAGES = 25
_BAR = 40


def as_text(explanation: Explanation) -> str:
    """The report, about 100 columns wide."""
    rank = largest(explanation)
    sections = [
        _title(explanation),
        _fits(explanation),
        _parameters(explanation),
        _memory(explanation),
        _messages(explanation, rank),
        *(_totals(explanation, other) for other in explanation.ranks),
        _time(explanation),
        _advice(explanation),
        _assumptions(explanation),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def compare_text(a: Explanation, b: Explanation) -> str:
    """Two settings side by side; ratios are of the second to the first."""
    layouts, axes = layout_difference(a, b), axis_difference(a, b)
    same = ["every parameter lies alike in both"]
    sections = [
        [*_named("a", a), *_named("b", b)],
        _lines(headline_difference(a, b)),
        ["memory is of the rank with the highest peak; " + UNITS],
        ["where parameters lie otherwise", *_stacked(layouts)] if layouts.rows else same,
        ["over each axis, of the looked-at rank that sends most in a step", *_lines(axes)] if axes.rows else [],
        ["times, tokens/s and MFU are an ESTIMATE from hardware constants; bytes and counts are arithmetic"],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _named(letter: str, explanation: Explanation) -> list[str]:
    return [f"{letter}: {explanation.model}, plan {explanation.plan}", f"   {explanation.setting}"]


def _title(explanation: Explanation) -> list[str]:
    source = f" ({explanation.plan_source})" if explanation.plan_source else ""
    return [
        f"{explanation.model}, plan {explanation.plan}{source}",
        *_wrapped(explanation.setting),
        size_told(explanation),
    ]


def _fits(explanation: Explanation) -> list[str]:
    rank, have = largest(explanation), explanation.machine_memory_bytes
    share = explanation.peak_bytes / have
    full = min(_BAR, round(share * _BAR))
    bar = "[" + "#" * full + "." * (_BAR - full) + "]"
    verdict = "it fits" if explanation.fits else "it does NOT fit"
    whose = rank_name(explanation, rank)
    return [f"{verdict}: {bar} {amount(rank.memory.peak)} of {amount(have)} ({percent(share)}) at the peak of {whose}"]


# -- sections -----------------------------------------------------------------------------------------------------


def _parameters(explanation: Explanation) -> list[str]:
    """Names without what equal layers share, which stands above them once."""
    table = parameter_table(explanation)
    piped = explanation.mesh.get("pp", 1) > 1
    keep = [place for place, name in enumerate(table.head) if piped or name != "stages"]
    rows, block, summed = [], "", False
    for line, row in zip(explanation.parameters, table.rows, strict=True):
        above, name = _inside(line)
        if above and above != block:
            rows.append((above,) + ("",) * (len(keep) - 1))
        block = above
        summed |= line.lies.endswith(SUMMED)
        cells = (name, *row[1:3], row[3].replace(SUMMED, " (+)"), *row[4:6], _spot(row[6], explanation))
        first, *tied = name.split(" = ")
        rows.append((first, *(cells[place] for place in keep[1:])))
        rows += [("  = " + other,) + ("",) * (len(keep) - 1) for other in tied]
    found = _lines(Table(tuple(table.head[place] for place in keep), rows))
    return [*found, *(["(+) each rank sees a part of the tokens: gradients are summed over tp"] if summed else [])]


def _inside(line: ParameterLine) -> tuple[str, str]:
    """(the layers it is in, its name there); ("", all of it) where it is in none, or has several names."""
    cut = line.name.rfind(".*.")
    times = f" (x{line.count})" if line.count > 1 else ""
    if cut < 0 or " = " in line.name:
        return "", line.name + times
    return line.name[: cut + 2] + times, "  " + line.name[cut + 3 :]


def _spot(rule: str, explanation: Explanation) -> str:
    """The line of the plan's file, which the title names."""
    return rule.removeprefix(f"{explanation.plan_source}:")


def _memory(explanation: Explanation) -> list[str]:
    owned = [f"{rank_name(explanation, rank)} owns {rank.units}" for rank in explanation.ranks]
    notes = [text for text in (recompute_told(explanation), f"{ranks_told(explanation)}; {UNITS}") if text]
    return [*_lines(memory_table(explanation)), *(line for text in [*owned, *notes] for line in _wrapped(text))]


def _messages(explanation: Explanation, rank: RankReport) -> list[str]:
    lines = costly_first(rank)
    if not lines:
        return [f"{rank_name(explanation, rank)} sends no message"]
    more = len(lines) - MOST_MESSAGES
    rest = [f"and {more} more, each costing less: --json and --html have them all"] if more > 0 else []
    title = f"messages of {rank_name(explanation, rank)} in one step, costly ones first"
    return [title, *_lines(message_table(lines[:MOST_MESSAGES])), *rest]


def _totals(explanation: Explanation, rank: RankReport) -> list[str]:
    if not rank.totals:
        return []
    return [f"over each axis, {rank_name(explanation, rank)}, one step", *_lines(total_table(rank))]


def _time(explanation: Explanation) -> list[str]:
    title = f"how long a step takes: an ESTIMATE from the constants of {explanation.machine}, not a measurement"
    return [title, *_lines(time_table(explanation)), *_wrapped(time_parts(explanation))]


def _advice(explanation: Explanation) -> list[str]:
    table = advice_table(explanation)
    if table.rows:
        return ["changes that were tried out, each by itself", *_lines(table)]
    return ["advice: no single change that was tried makes it clearly cheaper"]


def _assumptions(explanation: Explanation) -> list[str]:
    lines = [line for text in explanation.assumptions for line in _wrapped(text, "- ")]
    return ["what the figures assume (the constants' sources are in --json and --html)", *lines]


# -- print --------------------------------------------------------------------------------------------------------


def _lines(table: Table) -> list[str]:
    widths = [max(len(row[place]) for row in [table.head, *table.rows]) for place in range(len(table.head))]

    def line(row: tuple[str, ...]) -> str:
        cells = [
            cell.rjust(width) if place in table.numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(table.head), "  ".join("-" * width for width in widths), *map(line, table.rows)]


def _stacked(table: Table) -> list[str]:
    """Rows whose cells are too long to stand side by side."""
    found = []
    for name, first, second in table.rows:
        found += [name, f"  a  {first}", f"  b  {second}"]
    return found


def _wrapped(text: str, mark: str = "") -> list[str]:
    return wrap(text, WIDTH, initial_indent=mark, subsequent_indent=" " * len(mark), break_on_hyphens=False) or [""]
