"""The tables of an explanation, as rows of words: the terminal and the page print the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallelize.analysis.explanation import AxisTotal, Explanation, MessageLine, ParameterLine, RankReport
from parallelize.analysis.memory import RankMemory
from parallelize.analysis.pictures.words import amount, count, duration, operations, percent, plural, shape, times

Row = tuple[str, ...]
SUMMED = ", gradient summed"


@dataclass(frozen=True)
class Table:
    """head and rows; `numbers`: columns that stand to the right."""

    head: Row
    rows: Sequence[Row]
    numbers: frozenset[int] = frozenset()


class Parts(NamedTuple):
    """Bytes of a rank at its peak; they add up to it. `moving`: activations, and gradients that came in this step."""

    parameters: int
    optimizer: int
    gradients: int
    buffers: int
    moving: int


PART_NAMES = ("parameters", "optimiser state", "gradients", "communication buffers", "activations and new gradients")


def parts_of(memory: RankMemory) -> Parts:
    """Gradients that have a place of their own all through the step are a part; others come and go with the moments."""
    still = memory.parameters + memory.optimizer + memory.buffers
    top = max((moment.peak for moment in memory.moments), default=0)
    stays = memory.gradients if memory.peak == still + memory.gradients + top else 0
    return Parts(memory.parameters, memory.optimizer, stays, memory.buffers, memory.peak - still - stays)


def largest(explanation: Explanation) -> RankReport:
    """The looked-at rank with the highest peak."""
    return max(explanation.ranks, key=lambda rank: rank.memory.peak)


def rank_name(explanation: Explanation, rank: RankReport) -> str:
    return f"pp rank {rank.pp_rank}" if explanation.mesh.get("pp", 1) > 1 else "each rank"


def ranks_told(explanation: Explanation) -> str:
    """Which ranks the figures are of."""
    size = explanation.mesh.get("pp", 1)
    if size == 1:
        return "all ranks are alike; figures are of the first"
    ranks = ", ".join(str(rank.pp_rank) for rank in explanation.ranks)
    return f"figures are of pp ranks {ranks} of {size}: the first of each one's tp and data groups"


def headlines(explanation: Explanation) -> list[tuple[str, str, float]]:
    """(what, as words, as a number) of what a reader asks first."""
    time, rank = explanation.time, largest(explanation)
    memory = rank.memory
    return [
        ("parameters of the model", count(explanation.num_parameters), explanation.num_parameters),
        ("parameters of a rank, at most", *_most(explanation, lambda r: r.parameters, count)),
        ("peak memory of a rank", amount(memory.peak), memory.peak),
        ("  parameters", amount(memory.parameters), memory.parameters),
        ("  gradients", amount(memory.gradients), memory.gradients),
        ("  optimiser state", amount(memory.optimizer), memory.optimizer),
        ("  activations", amount(memory.activations), memory.activations),
        ("  communication buffers", amount(memory.buffers), memory.buffers),
        ("messages of a rank, at most", *_most(explanation, lambda r: sum(t.count for t in r.totals), _whole)),
        ("bytes sent by a rank, at most", *_most(explanation, lambda r: sum(t.sent_bytes for t in r.totals), amount)),
        ("step, in turn (estimate)", duration(time.in_turn_s), time.in_turn_s),
        ("step, overlapped (estimate)", duration(time.overlapped_s), time.overlapped_s),
        ("pipeline bubble (estimate)", percent(time.bubble_fraction), time.bubble_fraction),
        ("tokens/s, overlapped (estimate)", _whole(time.tokens_per_s), time.tokens_per_s),
        ("MFU, in turn (estimate)", percent(time.mfu_in_turn), time.mfu_in_turn),
        ("MFU, overlapped (estimate)", percent(time.mfu_overlapped), time.mfu_overlapped),
    ]


def _most(
    explanation: Explanation, of: Callable[[RankReport], float], words: Callable[[float], str]
) -> tuple[str, float]:
    value = max(of(rank) for rank in explanation.ranks)
    return words(value), value


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def parameter_table(explanation: Explanation) -> Table:
    head = ("parameter", "full", "local", "lies", "stages", "style", "rule")
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
    told = {
        "parameters": [amount(m.parameters) for m in memories],
        "gradients": [amount(m.gradients) for m in memories],
        "optimiser state": [amount(m.optimizer) for m in memories],
        "activations, at most": [amount(m.activations) for m in memories],
        "communication buffers": [amount(m.buffers) for m in memories],
        "peak": [amount(m.peak) for m in memories],
        f"of {amount(explanation.machine_memory_bytes)}": [
            percent(m.peak / explanation.machine_memory_bytes) for m in memories
        ],
        "where the peak is": [m.peak_at or "-" for m in memories],
    }
    head = ("memory", *(rank_name(explanation, rank) for rank in explanation.ranks))
    return Table(head, [(name, *cells) for name, cells in told.items()], frozenset(range(1, len(head))))


def recompute_told(explanation: Explanation) -> str:
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


def costly_first(rank: RankReport) -> list[MessageLine]:
    """By the time that they are estimated to take, so that a slow link and many small ones count more."""
    return sorted(rank.messages, key=lambda m: (-m.seconds, -m.sent_bytes, -m.bytes))


def message_table(lines: Iterable[MessageLine]) -> Table:
    head = ("operation", "axis", "ranks", "bytes each", "count", "sent in all", "pass", "module")
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
    tokens = time.tokens_per_s * time.overlapped_s
    in_turn = tokens / time.in_turn_s if time.in_turn_s else 0.0
    rows = [
        ("step", duration(time.in_turn_s), duration(time.overlapped_s)),
        ("tokens/s", _whole(in_turn), _whole(time.tokens_per_s)),
        ("MFU", percent(time.mfu_in_turn), percent(time.mfu_overlapped)),
    ]
    return Table(("time (estimate)", "in turn", "overlapped"), rows, frozenset({1, 2}))


def time_parts(explanation: Explanation) -> str:
    """Of the bound in turn, in words."""
    time = explanation.time
    work = f"forward and backward {duration(time.pipeline_s)}"
    if explanation.mesh.get("pp", 1) > 1:
        work = f"pipeline {duration(time.pipeline_s)} (of it bubble {percent(time.bubble_fraction)})"
    rest = f"data axes {duration(time.data_s)}, optimiser {duration(time.optimizer_s)}"
    return f"in turn: {work}, {rest}; {operations(time.flops)} on the busiest rank"


# -- two of them --------------------------------------------------------------------------------------------------


def headline_difference(a: Explanation, b: Explanation) -> Table:
    rows = [
        (what, first, second, times(before, after))
        for (what, first, before), (_, second, after) in zip(headlines(a), headlines(b), strict=True)
    ]
    fits = ("fits", *("yes" if e.fits else "NO" for e in (a, b)), "same" if a.fits == b.fits else "differs")
    return Table(("", "a", "b", "b/a"), [fits, *rows], frozenset({1, 2, 3}))


def axis_difference(a: Explanation, b: Explanation) -> Table:
    """Each axis: of the looked-at rank that sends most over it."""
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
    found: dict[str, AxisTotal] = {}
    for total in (total for rank in explanation.ranks for total in rank.totals):
        if total.axis not in found or total.sent_bytes > found[total.axis].sent_bytes:
            found[total.axis] = total
    return dict(sorted(found.items(), key=lambda item: -item[1].sent_bytes))


def layout_difference(a: Explanation, b: Explanation) -> Table:
    """Parameters that lie otherwise, or that only one of the two has."""
    rows = [(name, first, second) for name, first, second in _paired(a.parameters, b.parameters) if first != second]
    return Table(("parameter", "a", "b"), rows)


def _paired(a: Sequence[ParameterLine], b: Sequence[ParameterLine]) -> Iterator[tuple[str, str, str]]:
    before, after = _by_name(a), _by_name(b)
    for name in dict.fromkeys([*before, *after]):
        yield name, "; ".join(before.get(name, ["-"])), "; ".join(after.get(name, ["-"]))


def _by_name(lines: Sequence[ParameterLine]) -> dict[str, list[str]]:
    """A name may have several lines: layers of one kind that differ."""
    found: dict[str, list[str]] = {}
    for line in lines:
        several = line.stages[0] != line.stages[1]
        where = "" if line.stages == (0, 0) else f", stage{'s' * several} {stages(line)}"
        times_ = f" (x{line.count})" if line.count > 1 else ""
        words = f"{line.style or 'no rule'}: {shape(line.local)}{times_}, {line.lies}{where}"
        found.setdefault(line.name, []).append(words)
    return found


def advice_table(explanation: Explanation) -> Table:
    return Table(("change", "what it would give (estimate)"), [(one.change, one.gain) for one in explanation.advice])


def size_told(explanation: Explanation) -> str:
    ranks = 1
    for size in explanation.mesh.values():
        ranks *= size
    return f"{count(explanation.num_parameters)} parameters on {plural(ranks, 'rank')} ({explanation.machine})"
