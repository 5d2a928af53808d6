"""An explanation on the terminal: whether it fits, layouts of parameters, memory, messages, and the estimated time."""

from __future__ import annotations

from textwrap import wrap

from parallelize.base.terminal.numbers import UNITS, amount, percent
from parallelize.tools.analysis.show.explanation import Explanation, ParameterLine, RankReport
from parallelize.tools.analysis.show.tables import (
    SUMMED,
    Table,
    advice_table,
    axis_difference,
    balance_table,
    expected_parts,
    expensive_first,
    headline_difference,
    interval_note,
    largest,
    layout_difference,
    memory_table,
    message_table,
    parameter_table,
    part_difference,
    rank_name,
    ranks_note,
    recompute_note,
    size_note,
    time_parts,
    time_table,
    total_table,
    verdict_between,
    worst_routing_note,
)

WIDTH = 100
MAX_MESSAGES = 25
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
        _balance(explanation),
        _advice(explanation),
        _assumptions(explanation),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def compare_text(a: Explanation, b: Explanation) -> str:
    """Two settings side by side. Ratios are b/a."""
    layouts, axes = layout_difference(a, b), axis_difference(a, b)
    same = ["every parameter has the same layout in both"]
    sections = [
        [*_named("a", a), *_named("b", b)],
        _lines(headline_difference(a, b)),
        ["memory is of the rank with the highest peak; " + UNITS],
        ["parameters with different layouts", *_stacked(layouts)] if layouts.rows else same,
        ["over each axis, of the analyzed rank that sends most in a step", *_lines(axes)] if axes.rows else [],
        ["times, tokens/s and MFU are an ESTIMATE from hardware constants; bytes and counts are computed"],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def why_not_text(chosen: Explanation, other: Explanation) -> str:
    """What another mesh costs beside the chosen one, part by part."""
    sections = [
        [f"chosen: {chosen.setting}", f"other:  {other.setting}"],
        _lines(part_difference(chosen, other)),
        [f"chosen: {_fits(chosen)[0]}", f"other:  {_fits(other)[0]}"],
        _wrapped(verdict_between(chosen, other)),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _named(letter: str, explanation: Explanation) -> list[str]:
    return [f"{letter}: {explanation.model}, plan {explanation.plan}", f"   {explanation.setting}"]


def _title(explanation: Explanation) -> list[str]:
    source = f" ({explanation.plan_source})" if explanation.plan_source else ""
    return [
        f"{explanation.model}, plan {explanation.plan}{source}",
        *_wrapped(explanation.setting),
        size_note(explanation),
    ]


def _fits(explanation: Explanation) -> list[str]:
    rank, limit = largest(explanation), explanation.machine_memory_bytes
    fraction = explanation.peak_bytes / limit
    filled = min(_BAR, round(fraction * _BAR))
    bar = "[" + "#" * filled + "." * (_BAR - filled) + "]"
    verdict = "it fits" if explanation.fits else "it does NOT fit"
    used = f"{amount(rank.memory.peak)} of {amount(limit)} ({percent(fraction)})"
    lines = [f"{verdict}: {bar} {used} at the peak of {rank_name(explanation, rank)}"]
    if explanation.device_bytes:
        margin = limit - explanation.device_bytes
        words = f"{amount(margin)} to spare" if margin >= 0 else f"{amount(-margin)} too much"
        whole = f"with context and allocator {amount(explanation.device_bytes)}: {words}, for {explanation.kernels}"
        lines += _wrapped(whole)
    return lines


# -- sections -----------------------------------------------------------------------------------------------------


def _parameters(explanation: Explanation) -> list[str]:
    """The parameter table. The name that equal layers have in common is a line above their parameters."""
    table = parameter_table(explanation)
    has_stages = explanation.mesh.get("pp", 1) > 1
    columns = [index for index, name in enumerate(table.head) if has_stages or name != "stages"]
    empty = ("",) * (len(columns) - 1)
    rows, previous, summed = [], "", False
    for line, row in zip(explanation.parameters, table.rows, strict=True):
        layers, name = _split_name(line)
        if layers and layers != previous:
            rows.append((layers, *empty))
        previous = layers
        summed |= line.lies.endswith(SUMMED)
        rule = row[6].removeprefix(f"{explanation.plan_source}:")  # the line alone: the title names the file
        cells = (name, *row[1:3], row[3].replace(SUMMED, " (+)"), *row[4:6], rule)
        first, *tied = name.split(" = ")
        rows.append((first, *(cells[index] for index in columns[1:])))
        rows += [("  = " + alias, *empty) for alias in tied]
    lines = _lines(Table(tuple(table.head[index] for index in columns), rows))
    return [*lines, *(["(+) each rank sees a part of the tokens: gradients are summed over tp"] if summed else [])]


def _split_name(line: ParameterLine) -> tuple[str, str]:
    """(its layers, its name inside a layer); ("", its name) where it is in no layer or has several names."""
    split = line.name.rfind(".*.")
    times = f" (x{line.count})" if line.count > 1 else ""
    if split < 0 or " = " in line.name:
        return "", line.name + times
    return line.name[: split + 2] + times, "  " + line.name[split + 3 :]


def _memory(explanation: Explanation) -> list[str]:
    units = [f"{rank_name(explanation, rank)} owns {rank.units}" for rank in explanation.ranks]
    ranks = f"{ranks_note(explanation)}; {UNITS}"
    notes = [text for text in (recompute_note(explanation), worst_routing_note(explanation), ranks) if text]
    return [*_lines(memory_table(explanation)), *(line for text in [*units, *notes] for line in _wrapped(text))]


def _messages(explanation: Explanation, rank: RankReport) -> list[str]:
    lines = expensive_first(rank)
    if not lines:
        return [f"{rank_name(explanation, rank)} sends no message"]
    more = len(lines) - MAX_MESSAGES
    rest = [f"and {more} less expensive ones: --json and --html have them all"] if more > 0 else []
    title = f"messages of {rank_name(explanation, rank)} in one step, expensive ones first"
    return [title, *_lines(message_table(lines[:MAX_MESSAGES])), *rest]


def _totals(explanation: Explanation, rank: RankReport) -> list[str]:
    if not rank.totals:
        return []
    return [f"over each axis, {rank_name(explanation, rank)}, one step", *_lines(total_table(rank))]


def _time(explanation: Explanation) -> list[str]:
    title = f"time of a step: an ESTIMATE from the constants of {explanation.machine}, not a measurement"
    notes = (interval_note(explanation), expected_parts(explanation), time_parts(explanation))
    return [title, *_lines(time_table(explanation)), *(line for note in notes for line in _wrapped(note))]


def _balance(explanation: Explanation) -> list[str]:
    table, balance = balance_table(explanation), explanation.balance
    if balance is None:
        return []
    pair = balance.row_costs.pair / balance.row_costs.token if balance.row_costs.token else 0.0
    note = (
        "after: samples dealt by row_costs, stages cut by stage_costs, experts placed by expert_placement: --json has "
        f"them; at best: no choice is better; a squared token of a document costs {pair:.3g} tokens (data.pair_cost)"
    )
    title = "compute over ranks for the recorded lengths and routes: the mean over the largest"
    return [title, *_lines(table), *_wrapped(note)]


def _advice(explanation: Explanation) -> list[str]:
    table = advice_table(explanation)
    if table.rows:
        return ["single changes that would help, each computed alone", *_lines(table)]
    return ["advice: no single change that was computed makes it clearly cheaper"]


def _assumptions(explanation: Explanation) -> list[str]:
    lines = [line for text in explanation.assumptions for line in _wrapped(text, "- ")]
    return ["assumptions of the figures (sources of the constants: --json and --html)", *lines]


# -- print --------------------------------------------------------------------------------------------------------


def _lines(table: Table) -> list[str]:
    widths = [max(len(row[index]) for row in [table.head, *table.rows]) for index in range(len(table.head))]

    def line(row: tuple[str, ...]) -> str:
        cells = [
            cell.rjust(width) if index in table.numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(table.head), "  ".join("-" * width for width in widths), *map(line, table.rows)]


def _stacked(table: Table) -> list[str]:
    """Rows (name, a, b) as three lines each, because their cells are long."""
    lines = []
    for name, first, second in table.rows:
        lines += [name, f"  a  {first}", f"  b  {second}"]
    return lines


def _wrapped(text: str, bullet: str = "") -> list[str]:
    indent = " " * len(bullet)
    return wrap(text, WIDTH, initial_indent=bullet, subsequent_indent=indent, break_on_hyphens=False) or [""]
