"""The tables and notes of an explanation, as text: the terminal and the page print the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from parallelize.base.terminal.numbers import amount, count, duration, operations, percent, plural, shape, times
from parallelize.tools.analysis.cost.memory import RankMemory
from parallelize.tools.analysis.show.explanation import AxisTotal, Explanation, MessageLine, ParameterLine, RankReport

Row = tuple[str, ...]
SUMMED = ", gradient summed"


@dataclass(frozen=True)
class Table:
    """numbers: indices of the columns that are aligned to the right."""

    head: Row
    rows: Sequence[Row]
    numbers: frozenset[int] = frozenset()


class Parts(NamedTuple):
    """Bytes of a rank at its peak, which is their sum. moving: activations, and gradients that the step allocated."""

    parameters: int
    optimizer: int
    gradients: int
    buffers: int
    moving: int


PART_NAMES = ("parameters", "optimizer state", "gradients", "communication buffers", "activations and new gradients")


def parts_of(memory: RankMemory) -> Parts:
    """The parts of a rank's peak. Gradients are a separate part where they are allocated before the step (by a
    reducer)."""
    constant = memory.parameters + memory.optimizer + memory.fixed_gradients + memory.fixed_buffers
    return Parts(
        memory.parameters, memory.optimizer, memory.fixed_gradients, memory.fixed_buffers, memory.peak - constant
    )


def largest(explanation: Explanation) -> RankReport:
    """The analyzed rank with the highest peak."""
    return max(explanation.ranks, key=lambda rank: rank.memory.peak)


def rank_name(explanation: Explanation, rank: RankReport) -> str:
    return f"pp rank {rank.pp_rank}" if explanation.mesh.get("pp", 1) > 1 else "each rank"


def ranks_note(explanation: Explanation) -> str:
    """Which ranks were analyzed."""
    size = explanation.mesh.get("pp", 1)
    if size == 1:
        return "figures are of rank 0; the others are equal to it, or store and send less"
    ranks = ", ".join(str(rank.pp_rank) for rank in explanation.ranks)
    return (
        f"figures are of pp ranks {ranks} of {size} (the first, a middle and the last), of the first rank of each tp "
        "and data group"
    )


def headlines(explanation: Explanation) -> list[tuple[str, str, float]]:
    """(name, text, number) of the most important figures."""
    time, rank = explanation.time, largest(explanation)
    memory = rank.memory
    return [
        ("parameters of the model", count(explanation.num_parameters), explanation.num_parameters),
        ("parameters of a rank, at most", *_most(explanation, lambda r: r.parameters, count)),
        ("peak memory of a rank", amount(memory.peak), memory.peak),
        ("  parameters", amount(memory.parameters), memory.parameters),
        ("  gradients", amount(memory.gradients), memory.gradients),
        ("  optimizer state", amount(memory.optimizer), memory.optimizer),
        ("  activations", amount(memory.activations), memory.activations),
        ("  communication buffers", amount(memory.buffers), memory.buffers),
        ("messages of a rank, at most", *_most(explanation, lambda r: sum(t.count for t in r.totals), _integer)),
        ("bytes sent by a rank, at most", *_most(explanation, lambda r: sum(t.sent_bytes for t in r.totals), amount)),
        ("step (estimate)", duration(time.step_s), time.step_s),
        ("step, sequential (estimate)", duration(time.in_turn_s), time.in_turn_s),
        ("step, overlapped (estimate)", duration(time.overlapped_s), time.overlapped_s),
        ("pipeline bubble (estimate)", percent(time.bubble_fraction), time.bubble_fraction),
        ("tokens/s (estimate)", _integer(time.tokens_per_s), time.tokens_per_s),
        ("MFU (estimate)", percent(time.mfu), time.mfu),
        ("MFU, sequential (estimate)", percent(time.mfu_in_turn), time.mfu_in_turn),
        ("MFU, overlapped (estimate)", percent(time.mfu_overlapped), time.mfu_overlapped),
    ]


def _most(
    explanation: Explanation, figure_of: Callable[[RankReport], float], text_of: Callable[[float], str]
) -> tuple[str, float]:
    """(text, number) of the largest figure of all ranks."""
    value = max(figure_of(rank) for rank in explanation.ranks)
    return text_of(value), value


def _integer(value: float) -> str:
    return f"{value:,.0f}"


def parameter_table(explanation: Explanation) -> Table:
    head = ("parameter", "full", "local", "layout", "stages", "style", "rule")
    rows = [
        (name_of(line), shape(line.full), shape(line.local), line.lies, stages(line), line.style or "-", line.rule)
        for line in explanation.parameters
    ]
    return Table(head, rows)


def name_of(line: ParameterLine) -> str:
    return f"{line.name} (x{line.count})" if line.count > 1 else line.name


def stages(line: ParameterLine) -> str:
    first, last = line.stages
    return str(first) if first == last else f"{first}-{last}"


def memory_table(explanation: Explanation) -> Table:
    """Ranks side by side."""
    memories = [rank.memory for rank in explanation.ranks]
    rows = {
        "parameters": [amount(m.parameters) for m in memories],
        "gradients": [amount(m.gradients) for m in memories],
        "optimizer state": [amount(m.optimizer) for m in memories],
        "activations, at most": [amount(m.activations) for m in memories],
        "communication buffers": [amount(m.buffers) for m in memories],
        "peak": [amount(m.peak) for m in memories],
        f"of {amount(explanation.machine_memory_bytes)}": [
            percent(m.peak / explanation.machine_memory_bytes) for m in memories
        ],
        "where the peak is": [m.peak_at or "-" for m in memories],
    }
    head = ("memory", *(rank_name(explanation, rank) for rank in explanation.ranks))
    return Table(head, [(name, *cells) for name, cells in rows.items()], frozenset(range(1, len(head))))


def recompute_note(explanation: Explanation) -> str:
    """Activations with and without recompute; empty where the model has nothing to recompute."""
    without, with_it = explanation.activations_without_recompute, explanation.activations_with_recompute
    if not without or not with_it:
        return ""
    now = explanation.options.get("recompute", "off")
    first = "of pp rank 0 " if explanation.mesh.get("pp", 1) > 1 else ""
    return (
        f"activations {first}at their peak: {amount(without)} without recompute, {amount(with_it)} with "
        f"recompute=full; here recompute={now}"
    )


def worst_routing_note(explanation: Explanation) -> str:
    """What a rank of `ep` receives and stores if it gets all tokens; empty without `ep`."""
    worst = explanation.worst_routing
    if worst is None:
        return ""
    limit = explanation.machine_memory_bytes
    verdict = "which fits" if worst.peak_bytes < limit else f"which does NOT fit in {amount(limit)}"
    return (
        "all figures assume that routers divide tokens evenly; a rank that gets all tokens of its ep group, in every "
        "layer, has "
        f"{count(worst.rows)} tokens in a layer (evenly {count(worst.even_rows)}), computes {count(worst.choices)} "
        "choices of experts "
        f"(evenly {count(worst.even_choices)}), receives {amount(worst.received_bytes)} over ep in a step (evenly "
        f"{amount(worst.even_received_bytes)}), and its peak is {amount(worst.peak_bytes)} (evenly "
        f"{amount(worst.even_peak_bytes)}), "
        f"{verdict}"
    )


def balance_table(explanation: Explanation) -> Table:
    """How evenly recorded lengths and routes are computed over ranks."""
    lines = explanation.balance.lines if explanation.balance is not None else ()
    rows = [
        (
            line.name,
            f"{line.before:.3f}",
            f"{line.after:.3f}",
            f"{line.best:.3f}" if line.best else "",
            line.bound,
        )
        for line in lines
    ]
    return Table(("balance of", "before", "after", "at best", "bounded by"), rows, frozenset({1, 2, 3}))


def expensive_first(rank: RankReport) -> list[MessageLine]:
    """Messages by estimated time, so that a slow link or a large number of small messages counts more."""
    return sorted(rank.messages, key=lambda m: (-m.seconds, -m.sent_bytes, -m.bytes))


def message_table(lines: Iterable[MessageLine]) -> Table:
    head = ("operation", "axis", "ranks", "bytes each", "count", "sent in total", "pass", "module")
    rows = [
        (m.op, m.axis, str(m.ranks), amount(m.bytes), f"{m.count:,}", amount(m.sent_bytes), m.phase, m.module)
        for m in lines
    ]
    return Table(head, rows, frozenset({2, 3, 4, 5}))


def total_table(rank: RankReport) -> Table:
    head = ("axis", "ranks", "messages", "bytes", "sent", "time (estimate)", "link")
    rows = [
        (t.axis, str(t.ranks), f"{t.count:,}", amount(t.bytes), amount(t.sent_bytes), duration(t.seconds), t.link)
        for t in rank.totals
    ]
    return Table(head, rows, frozenset({1, 2, 3, 4, 5}))


def time_table(explanation: Explanation) -> Table:
    time = explanation.time
    tokens = time.tokens_per_s * time.step_s
    columns = (
        (time.step_s, time.mfu),
        (time.in_turn_s, time.mfu_in_turn),
        (time.overlapped_s, time.mfu_overlapped),
    )
    rows = [
        ("step", *(duration(seconds) for seconds, _ in columns)),
        ("tokens/s", *(_integer(tokens / seconds if seconds else 0.0) for seconds, _ in columns)),
        ("MFU", *(percent(mfu) for _, mfu in columns)),
    ]
    return Table(("time (estimate)", "expected", "sequential", "overlapped"), rows, frozenset({1, 2, 3}))


def interval_note(explanation: Explanation) -> str:
    """The interval of the estimate, and the least time, as text."""
    time, interval = explanation.time, explanation.interval
    least = f"no schedule on this mesh goes below {duration(time.least_s)}: its matmuls, or its messages, at full rate"
    if interval is None:
        return least
    between = f"90% of such steps take between {duration(interval.low)} and {duration(interval.high)}"
    scored = f" (not scored on this hardware: {explanation.not_scored})" if explanation.not_scored else ""
    return f"expected {duration(time.step_s)}: {between}{scored}; {least}"


def expected_parts(explanation: Explanation) -> str:
    """The parts of the estimate, as text."""
    parts = (f"{name} {duration(seconds)}" for name, seconds in explanation.time.parts.items() if seconds > 0)
    return f"expected: {', '.join(parts)}"


def time_parts(explanation: Explanation) -> str:
    """The parts of the sequential bound, as text."""
    time = explanation.time
    work = f"forward and backward {duration(time.pipeline_s)}"
    if explanation.mesh.get("pp", 1) > 1:
        work = f"pipeline {duration(time.pipeline_s)} (of it bubble {percent(time.bubble_fraction)})"
    rest = f"data axes {duration(time.data_s)}, optimizer {duration(time.optimizer_s)}"
    return f"sequential: {work}, {rest}; {operations(time.flops)} on the rank with the most"


# -- two explanations ---------------------------------------------------------------------------------------------


def headline_difference(a: Explanation, b: Explanation) -> Table:
    rows = [
        (name, first, second, times(before, after))
        for (name, first, before), (_, second, after) in zip(headlines(a), headlines(b), strict=True)
    ]
    fits = ("fits", *("yes" if e.fits else "NO" for e in (a, b)), "same" if a.fits == b.fits else "differs")
    return Table(("", "a", "b", "b/a"), [fits, *rows], frozenset({1, 2, 3}))


def part_difference(chosen: Explanation, other: Explanation) -> Table:
    """Seconds of each part of both estimates, and what the other one adds."""
    before, after = chosen.time.parts, other.time.parts
    pairs = {name: (before.get(name, 0.0), after.get(name, 0.0)) for name in dict.fromkeys([*before, *after])}
    rows = [(name, *map(duration, pair), _signed(pair[1] - pair[0])) for name, pair in pairs.items() if any(pair)]
    whole = (chosen.time.step_s, other.time.step_s)
    rows.append(("step (estimate)", *map(duration, whole), _signed(whole[1] - whole[0])))
    return Table(("part of the estimate", "chosen", "other", "more"), rows, frozenset({1, 2, 3}))


def _signed(seconds: float) -> str:
    return ("-" if seconds < 0 else "+") + duration(abs(seconds))


def verdict_between(chosen: Explanation, other: Explanation) -> str:
    """Why not the other one, as text."""
    if not other.fits:
        return f"the other one needs {amount(other.device_bytes - other.machine_memory_bytes)} more than there is"
    ratio = other.time.step_s / chosen.time.step_s - 1
    worst = max(other.time.parts, key=lambda name: other.time.parts[name] - chosen.time.parts.get(name, 0.0))
    if ratio <= 0:
        return f"nothing speaks against the other one: it is expected to be {percent(-ratio)} faster"
    return f"the other one is expected to take {percent(ratio)} longer, most of it for: {worst}"


def axis_difference(a: Explanation, b: Explanation) -> Table:
    """One row per axis, for the analyzed rank that sends most over it."""
    before, after = _by_axis(a), _by_axis(b)
    rows = []
    for axis in dict.fromkeys([*before, *after]):
        first, second = before.get(axis, _NONE), after.get(axis, _NONE)
        sent = (amount(first.sent_bytes), amount(second.sent_bytes), times(first.sent_bytes, second.sent_bytes))
        spent = (duration(first.seconds), duration(second.seconds), times(first.seconds, second.seconds))
        rows.append((axis, f"{first.count:,}", f"{second.count:,}", *sent, *spent))
    head = ("axis", "messages a", "b", "sent a", "b", "b/a", "time a (estimate)", "b", "b/a")
    return Table(head, rows, frozenset(range(1, 9)))


_NONE = AxisTotal("", 1, 0, 0, 0.0, 0.0, "")


def _by_axis(explanation: Explanation) -> dict[str, AxisTotal]:
    totals: dict[str, AxisTotal] = {}
    for total in (total for rank in explanation.ranks for total in rank.totals):
        if total.axis not in totals or total.sent_bytes > totals[total.axis].sent_bytes:
            totals[total.axis] = total
    return dict(sorted(totals.items(), key=lambda item: -item[1].sent_bytes))


def layout_difference(a: Explanation, b: Explanation) -> Table:
    """Parameters with different layouts, or that only one of the two has."""
    rows = [(name, first, second) for name, first, second in _paired(a.parameters, b.parameters) if first != second]
    return Table(("parameter", "a", "b"), rows)


def _paired(a: Sequence[ParameterLine], b: Sequence[ParameterLine]) -> Iterator[tuple[str, str, str]]:
    """(name, layouts in `a`, layouts in `b`) of each parameter."""
    before, after = _by_name(a), _by_name(b)
    for name in dict.fromkeys([*before, *after]):
        yield name, "; ".join(before.get(name, ["-"])), "; ".join(after.get(name, ["-"]))


def _by_name(lines: Sequence[ParameterLine]) -> dict[str, list[str]]:
    """name -> layouts as text. A name has several where layers differ."""
    layouts: dict[str, list[str]] = {}
    for line in lines:
        word = "stage" if line.stages[0] == line.stages[1] else "stages"
        on_stages = "" if line.stages == (0, 0) else f", {word} {stages(line)}"
        repeats = f" (x{line.count})" if line.count > 1 else ""
        layout = f"{line.style or 'no rule'}: {shape(line.local)}{repeats}, {line.lies}{on_stages}"
        layouts.setdefault(line.name, []).append(layout)
    return layouts


def advice_table(explanation: Explanation) -> Table:
    rows = [(advice.change, advice.gain) for advice in explanation.advice]
    return Table(("change", "its effect (estimate)"), rows)


def size_note(explanation: Explanation) -> str:
    ranks = prod(explanation.mesh.values())
    return f"{count(explanation.num_parameters)} parameters on {plural(ranks, 'rank')} ({explanation.machine})"
