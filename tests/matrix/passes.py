"""A pass over all cells: verdicts into the journal, a summary, and the golden table where it is asked for."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.matrix import journal, verdicts
from tests.matrix.cells import CRASHED, REFUSED, WRONG, run_cell
from tests.matrix.journal import Entry
from tests.matrix.verdicts import Cell
from tests.matrix.workers import TIMEOUT_S, Job, Outcome, run_cells

_OFTEN = 25  # cells between two lines of progress
_FEW = 40  # failures that are listed


def run_pass(
    feature: str = "",
    kind: str = "",
    *,
    record: bool = False,
    golden: Path = verdicts.GOLDEN,
    **options: Any,
) -> int:
    """Run the cells of the table that the journal does not have; how many cells fail.

    Args:
        feature, kind: only those. record: write the golden table, golden. options: of `run_through`.
    """
    every, table = verdicts.all_cells(), verdicts.read(golden)
    cells = [cell for cell in every if feature in ("", cell[0]) and kind in ("", cell[1])]
    found = run_through(cells, table, **options)
    if record:
        results = {cell: entry.verdict for cell, entry in found.items()}
        verdicts.write(verdicts.merged(table, results, every), golden)
        print(f"recorded in {golden.name}")
    return len(failures(found, table))


def run_through(
    cells: list[Cell],
    table: Mapping[Cell, verdicts.Verdict],
    *,
    workers: int = 2,
    seconds: float | None = None,
    fresh: bool = False,
    failed: bool = False,
    any_sources: bool = False,
    path: Path = journal.JOURNAL,
    timeout_s: float = TIMEOUT_S,
    job: Job = run_cell,
) -> dict[Cell, Entry]:
    """The verdicts of cells: of those that the journal does not have by running them. Prints a summary.

    Args:
        table: what they were before. workers: processes. seconds: no cell begins after so many.
        fresh: all of them once more. failed: those that are wrong or crashed once more.
        any_sources: verdicts of earlier sources count too.
        path, timeout_s: the journal, and the limit of one cell. job: what runs a cell.
    """
    found = {} if fresh else journal.entries(path, any_sources)
    if failed:
        found = {cell: entry for cell, entry in found.items() if entry.word not in (WRONG, CRASHED)}
    left = [cell for cell in cells if cell not in found]
    print(f"{len(cells)} cells, {len(cells) - len(left)} of them in the journal", flush=True)
    for entry in _run(left, path, workers=workers, seconds=seconds, timeout_s=timeout_s, job=job):
        found[entry.cell] = entry
    found = {cell: found[cell] for cell in cells if cell in found}
    print("\n".join(summary(found, len(cells), table)), flush=True)
    return found


def _run(left: list[Cell], path: Path, **options: Any) -> Iterator[Entry]:
    began, words = time.monotonic(), Counter()
    for number, outcome in enumerate(run_cells(left, **options), start=1):
        entry = _entry(outcome)
        journal.append(entry, path)
        words[entry.word] += 1
        if entry.word in (WRONG, CRASHED):
            print(f"{' '.join(entry.cell)}: {entry.verdict}", flush=True)
        if number % _OFTEN == 0 or number == len(left):
            taken = time.monotonic() - began
            remaining = taken / number * (len(left) - number)
            counts = ", ".join(f"{count} {word}" for word, count in words.items())
            print(
                f"[{number}/{len(left)}] {taken:.0f} s, {remaining:.0f} s left: {counts}", file=sys.stderr, flush=True
            )
        yield entry


def _entry(outcome: Outcome) -> Entry:
    feature, kind, axis = outcome.cell
    verdict, seconds = outcome.verdict, round(outcome.seconds, 2)
    return Entry(feature, kind, axis, verdict.word, verdict.detail, seconds, journal.sources_of(feature))


def failures(found: Mapping[Cell, Entry], table: Mapping[Cell, verdicts.Verdict]) -> dict[Cell, str]:
    """Cells that are wrong, crash, or were right and are refused; with what they are."""
    problems = {}
    for cell, entry in found.items():
        how = verdicts.compare(entry.verdict, table.get(cell))
        if how in (verdicts.FAILED, verdicts.LOST):
            problems[cell] = f"{entry.verdict}{' and was right' if how == verdicts.LOST else ''}"
    return problems


def summary(found: Mapping[Cell, Entry], total: int, table: Mapping[Cell, verdicts.Verdict]) -> list[str]:
    """The text after a pass."""
    text = [f"{len(found)} of {total} cells have a verdict"]
    words = Counter(entry.word for entry in found.values())
    slugs = Counter(entry.detail for entry in found.values() if entry.word == REFUSED)
    text += [f"  {count:5} {word}" for word, count in words.most_common()]
    text += [f"  {count:5} refused {slug}" for slug, count in slugs.most_common()]
    for name in ("", "llama", "mixture"):
        text.append(f"refused{f' of {name}' if name else ''}: {_share_refused(found, name):.1%}")
    compared = Counter(verdicts.compare(entry.verdict, table.get(cell)) for cell, entry in found.items())
    text.append("beside the golden table: " + ", ".join(f"{count} {how}" for how, count in compared.most_common()))
    text += [
        f"  {' '.join(cell)}: was {table[cell]}, is {entry.verdict}"
        for cell, entry in found.items()
        if verdicts.compare(entry.verdict, table.get(cell)) in (verdicts.BETTER, verdicts.CHANGED)
    ][:_FEW]
    if seconds := sorted(entry.seconds for entry in found.values()):
        late = seconds[math.ceil(0.95 * len(seconds)) - 1]
        text.append(f"a cell takes {statistics.median(seconds):.1f} s in the median, 95% of them at most {late:.1f} s")
    problems = failures(found, table)
    text.append(f"{len(problems)} failures")
    text += [f"  {' '.join(cell)}: {problem}" for cell, problem in list(problems.items())[:_FEW]]
    if len(problems) > _FEW:
        text.append(f"  and {len(problems) - _FEW} more")
    return text


def _share_refused(found: Mapping[Cell, Entry], kind: str) -> float:
    words = [entry.word for entry in found.values() if kind in ("", entry.kind)]
    return words.count(REFUSED) / max(len(words), 1)
