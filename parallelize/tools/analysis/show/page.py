"""An explanation as one page: HTML that contains its style sheet and pictures, without scripts or external files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from parallelize.base.pictures.html import document, figure, paragraph, scroll, section
from parallelize.base.pictures.html import table as as_table
from parallelize.base.pictures.svg import (
    WIDTH,
    axis_below,
    box,
    bytes_scale,
    legend,
    picture,
    shortened,
    text_at,
    text_width,
)
from parallelize.base.terminal.numbers import UNITS, amount, duration, percent, plural, times
from parallelize.tools.analysis.show.charts import draw_pipeline, draw_shards
from parallelize.tools.analysis.show.explanation import Explanation, RankReport
from parallelize.tools.analysis.show.memory_chart import draw_parts, draw_step, key, scale_of
from parallelize.tools.analysis.show.tables import (
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
    rank_name,
    ranks_note,
    recompute_note,
    size_note,
    time_parts,
    time_table,
    total_table,
    worst_routing_note,
)

_ESTIMATE = '<span class="tag">estimate</span>'
_MAX_OPEN_MESSAGES = 40  # longer tables of messages are folded


def as_html(explanation: Explanation) -> str:
    """The page of one setting."""
    body = [
        f"<h1>{escape(explanation.model)}</h1>",
        paragraph(f"plan {explanation.plan}" + (f" ({explanation.plan_source})" if explanation.plan_source else "")),
        f"<p><code>{escape(explanation.setting)}</code><br/>{escape(size_note(explanation))}</p>",
        _cards(explanation),
        section("Memory", *_memory(explanation)),
        section("Time of a step " + _ESTIMATE, *_time(explanation)),
        section("What is sent", *_traffic(explanation)),
        section("Layouts of parameters over tp", *_parameters(explanation)),
        section("Single changes that would help", *_advice(explanation)),
        section("Assumptions and constants", *_assumptions(explanation)),
    ]
    return _document(f"{explanation.model}: {explanation.setting}", body)


def compare_html(a: Explanation, b: Explanation) -> str:
    """The page of two settings side by side. Ratios are b/a."""
    lettered = (("a", a), ("b", b))
    body = [
        "<h1>Two settings compared</h1>",
        *(
            f"<p><b>{letter}</b> {escape(e.model)}, plan {escape(e.plan)}<br/><code>{escape(e.setting)}</code></p>"
            for letter, e in lettered
        ),
        section(
            "Figures",
            _table(headline_difference(a, b)),
            paragraph(f"Memory is of the rank with the highest peak. {UNITS}."),
        ),
        section("Memory", *_memory_of_both(a, b)),
        section("Pipelines " + _ESTIMATE, *_pipelines(a, b)) if _has_pipeline(a) or _has_pipeline(b) else "",
        section("What is sent", *_traffic_of_both(a, b)),
        section("Parameters with different layouts", *_layouts(a, b)),
        *(section(f"Assumptions of {letter}", *_assumptions(e)) for letter, e in lettered),
    ]
    return _document(f"{a.model}: {a.setting} | {b.setting}", body)


# -- one setting --------------------------------------------------------------------------------------------------


def _cards(explanation: Explanation) -> str:
    time, limit = explanation.time, explanation.machine_memory_bytes
    fraction = explanation.peak_bytes / limit
    sent = max(sum(total.sent_bytes for total in rank.totals) for rank in explanation.ranks)
    between = explanation.interval or (time.overlapped_s, time.in_turn_s)
    steps = f"{duration(time.step_s)}; 90% of such steps: {duration(between[0])} to {duration(between[1])}"
    mfus = percent(time.mfu)
    fits = "yes" if explanation.fits else "no"
    cards = [
        _card("Does it fit?", fits, f"{percent(fraction)} of {amount(limit)}", _meter(fraction)),
        _card("Peak memory of a rank", amount(explanation.peak_bytes), f"at {largest(explanation).memory.peak_at}"),
        _card(f"Step {_ESTIMATE}", steps, "overlapped to sequential"),
        _card(f"MFU {_ESTIMATE}", mfus, "sequential to overlapped"),
        _card(f"Tokens/s {_ESTIMATE}", f"{time.tokens_per_s:,.0f}", "overlapped, all ranks together"),
        _card("Sent by a rank", amount(sent), "in one step, at most"),
    ]
    return f'<div class="cards{"" if explanation.fits else " over"}">{"".join(cards)}</div>'


def _card(title: str, figure: str, note: str, meter: str = "") -> str:
    """title and meter are HTML."""
    top = f'<div class="note">{title}</div><div class="figure">{escape(figure)}</div>'
    return f'<div class="card">{top}{meter}<div class="note">{escape(note)}</div></div>'


def _meter(fraction: float) -> str:
    return f'<div class="meter"><div style="width:{100 * min(fraction, 1):.0f}%"></div></div>'


def _memory(explanation: Explanation) -> Iterable[str]:
    top = scale_of(explanation)
    named = [(rank_name(explanation, rank), explanation, rank) for rank in explanation.ranks]
    yield figure(draw_parts(named), f"The parts of each rank's peak: {ranks_note(explanation)}.")
    pictures = [scroll(draw_step(explanation, rank, top)) for rank in explanation.ranks]
    caption = "Memory over one step. A backward frees what its forward saved; an action's moments are spread evenly."
    yield figure(key() + "".join(pictures), caption)
    yield _table(memory_table(explanation))
    routing = worst_routing_note(explanation)
    notes = [text for text in (recompute_note(explanation), routing, ranks_note(explanation), UNITS) if text]
    yield paragraph(". ".join(text[0].upper() + text[1:] for text in notes) + ".")


def _time(explanation: Explanation) -> Iterable[str]:
    if _has_pipeline(explanation):
        timeline = explanation.time.timeline
        picture = scroll(draw_pipeline(timeline, f"pipeline, {timeline.name}"))
        yield figure(picture, "The pipeline's actions. Messages are not overlapped.")
    yield _table(time_table(explanation))
    yield paragraph(f"Time, {interval_note(explanation)}.")
    yield paragraph(f"Time, {expected_parts(explanation)}.")
    yield paragraph(f"Time, {time_parts(explanation)}. Overlapped: everything is hidden that can be.")
    if explanation.balance is not None:
        yield _table(balance_table(explanation))
        yield paragraph("Compute over ranks for the recorded lengths and routes: the mean over the largest.")


def _has_pipeline(explanation: Explanation) -> bool:
    return len(explanation.time.timeline.spans) > 1


def _traffic(explanation: Explanation) -> Iterable[str]:
    if not any(rank.totals for rank in explanation.ranks):
        yield paragraph("Nothing is sent: there is one rank.")
        return
    yield figure(
        draw_traffic([(rank_name(explanation, rank), rank) for rank in explanation.ranks]),
        "Bytes that a rank sends over each axis.",
    )
    for rank in explanation.ranks:
        yield f"<h3>{escape(rank_name(explanation, rank))}, over each axis</h3>" + _table(total_table(rank))
    for rank in explanation.ranks:
        yield _messages(explanation, rank)


def _messages(explanation: Explanation, rank: RankReport) -> str:
    lines = expensive_first(rank)
    title = f"Messages of {rank_name(explanation, rank)} in one step, expensive ones first ({len(lines)} lines)"
    is_open = ' open="open"' if rank is largest(explanation) and len(lines) <= _MAX_OPEN_MESSAGES else ""
    return f"<details{is_open}><summary>{escape(title)}</summary>{_table(message_table(lines))}</details>"


def _parameters(explanation: Explanation) -> Iterable[str]:
    pictures, replicated = draw_shards(explanation)
    caption = (
        "Equal parameters once, each in its own proportions, dim 0 downwards. The shard of the first tp rank is filled."
    )
    if pictures:
        yield figure(f'<div class="tiles">{"".join(pictures)}</div>', caption)
    if replicated:
        yield paragraph("Replicated vectors: " + ", ".join(replicated) + ".")
    yield _table(parameter_table(explanation))


def _advice(explanation: Explanation) -> Iterable[str]:
    table = advice_table(explanation)
    yield _table(table) if table.rows else paragraph("No single change that was computed makes it clearly cheaper.")


def _assumptions(explanation: Explanation) -> Iterable[str]:
    yield "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in explanation.assumptions) + "</ul>"
    values = explanation.machine_constants
    rows = [(name, f"{values[name]:,g}", source or "-") for name, source in explanation.machine_sources.items()]
    if rows:
        yield _table(Table((f"constant of {explanation.machine}", "value", "where it comes from"), rows))


# -- two settings -------------------------------------------------------------------------------------------------


def _memory_of_both(a: Explanation, b: Explanation) -> Iterable[str]:
    ranks = [(letter, e, rank) for letter, e in (("a", a), ("b", b)) for rank in e.ranks]
    yield figure(
        key() + draw_parts([(f"{letter}, {rank_name(e, rank)}", e, rank) for letter, e, rank in ranks]),
        f"The parts of each rank's peak: {amount(a.peak_bytes)} and {amount(b.peak_bytes)}, "
        f"{times(a.peak_bytes, b.peak_bytes)}.",
    )
    top = scale_of(a, b)
    for letter, e in (("a", a), ("b", b)):
        caption = f"{letter}: memory over one step, of the rank with the highest peak."
        yield figure(scroll(draw_step(e, largest(e), top)), caption)


def _pipelines(a: Explanation, b: Explanation) -> Iterable[str]:
    end = max(a.time.timeline.makespan, b.time.timeline.makespan)
    for letter, e in (("a", a), ("b", b)):
        if _has_pipeline(e):
            yield figure(scroll(draw_pipeline(e.time.timeline, f"{letter}: {e.time.timeline.name}", end)), "")


def _traffic_of_both(a: Explanation, b: Explanation) -> Iterable[str]:
    table = axis_difference(a, b)
    if not table.rows:
        yield paragraph("Neither sends anything.")
        return
    named = [(f"{letter}, {rank_name(e, largest(e))}", largest(e)) for letter, e in (("a", a), ("b", b))]
    yield figure(draw_traffic(named), "Bytes that the rank with the highest peak sends over each axis.")
    yield _table(table) + paragraph("The table is of the analyzed rank that sends most over each axis.")


def _layouts(a: Explanation, b: Explanation) -> Iterable[str]:
    table = layout_difference(a, b)
    yield _table(table) if table.rows else paragraph("Every parameter has the same layout in both.")


# -- HTML -------------------------------------------------------------------------------------------------------------


def _document(title: str, body: Sequence[str]) -> str:
    foot = paragraph(
        "Bytes and counts are computed from the code that runs. Times, tokens/s and MFU are estimates, not "
        "measurements."
    )
    return document(title, [*body, f"<footer>{foot}</footer>"])


def _table(table: Table) -> str:
    return as_table(table.head, table.rows, table.numbers)


# -- traffic chart ---------------------------------------------------------------------------------------------------
# A picture of traffic: bytes that a rank sends over each axis in a step, by operation.


_FILLS = {"all_reduce": "c0", "all_gather": "c1", "reduce_scatter": "c2", "send": "c4", "all_to_all": "c5"}
_OTHER = "c6"


def draw_traffic(named: Sequence[tuple[str, RankReport]]) -> str:
    """Bars of several ranks (or settings) under each axis."""
    axes = list(dict.fromkeys(total.axis for _, rank in named for total in rank.totals))
    rows = [(axis, name, rank) for axis in axes for name, rank in named if _sent(rank, axis)]
    if not rows:
        return ""
    end = max(sum(_sent(rank, axis).values()) for axis, _, rank in rows) * 1.02
    left = min(280.0, max(text_width(f"{axis}, {name}") for axis, name, _ in rows) + 16)
    right, floor = WIDTH - 270.0, 8 + 26.0 * len(rows)
    factor, unit = bytes_scale(end)
    body = axis_below(left, right, 4, floor, end * factor, f"bytes sent in one step, {unit}")
    for row, (axis, name, rank) in enumerate(rows):
        body += _bar(f"{axis}, {name}", rank, axis, y=9 + 26.0 * row, left=left, across=(right - left) / end)
    used = list(dict.fromkeys(op for axis, _, rank in rows for op in _sent(rank, axis)))
    key, bottom = legend([(_FILLS.get(op, _OTHER), op) for op in used], 6, WIDTH - 10, floor + 40)
    return picture("bytes sent over each axis in one step", WIDTH, bottom + 2, [*body, *key])


def _sent(rank: RankReport, axis: str) -> dict[str, float]:
    """operation -> bytes."""
    sizes: dict[str, float] = {}
    for message in rank.messages:
        if message.axis == axis and message.sent_bytes:
            sizes[message.op] = sizes.get(message.op, 0.0) + message.sent_bytes
    return sizes


def _bar(label: str, rank: RankReport, axis: str, *, y: float, left: float, across: float) -> list[str]:
    """across: units of the picture per byte."""
    body, x = [text_at(6, y + 13, shortened(label, left - 10))], left
    for op, size in _sent(rank, axis).items():
        body.append(box(x, y, size * across, 18, _FILLS.get(op, _OTHER), f"{label}, {op}: {amount(size)}"))
        x += size * across
    total = next(total for total in rank.totals if total.axis == axis)
    summary = f"{amount(total.sent_bytes)} in {plural(total.count, 'message')}, about {duration(total.seconds)}"
    return [*body, text_at(x + 6, y + 13, summary, style="halo", size=11)]
