"""The record of rows that met in one loop, in docs/matrix.md: cells, verdicts, slugs and the day, from the journal."""

from __future__ import annotations

import re
import time
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import median

from tests.matrix import journal
from tests.matrix.cells import REFUSED, RIGHT
from tests.matrix.journal import Entry
from tests.matrix.pairs import pairs, rows

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
_PLACE = re.compile(r"(?<=<!-- record -->\n).*?(?=<!-- end of the record -->)", re.DOTALL)


def write_record(path: Path) -> None:
    """The last verdict of each cell of the journal, of whatever sources it was made with, into the page."""
    found = list(journal.entries(path, any_sources=True).values())
    text = PAGE.read_text()
    PAGE.write_text(_PLACE.sub(lambda _: "\n".join(lines(found)) + "\n", text))
    print(f"recorded in {PAGE.name}")


def lines(found: list[Entry]) -> list[str]:
    """The text: one table by how many rows meet in a cell, one of the slugs."""
    sizes: dict[int, list[Entry]] = {}
    for entry in found:
        sizes.setdefault(entry.feature.count("+") + 1, []).append(entry)
    met = {pair for entry in found if entry.word == RIGHT for pair in combinations(entry.feature.split("+"), 2)}
    text = [
        f"{time.strftime('%Y-%m-%d')}: {len(rows())} rows meet others, in {len(pairs())} pairs;"
        f" {len(met & set(pairs()))} of these were in a cell that is right.",
        "",
        "| rows of a cell | cells | right | refused | wrong or crashed | seconds a cell, median |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for size, entries in sorted(sizes.items()):
        words = Counter(entry.word for entry in entries)
        others = len(entries) - words[RIGHT] - words[REFUSED]
        taken = median(entry.seconds for entry in entries)
        text.append(f"| {size} | {len(entries)} | {words[RIGHT]} | {words[REFUSED]} | {others} | {taken:.1f} |")
    slugs = Counter(entry.detail for entry in found if entry.word == REFUSED)
    text += ["", "| refused by | cells |", "| --- | --- |"]
    return text + [
        f"| `{slug}` | {count} |" for slug, count in sorted(slugs.items(), key=lambda row: (-row[1], row[0]))
    ]
