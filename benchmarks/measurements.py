"""Writes the tables of docs/measurements.md from the records of the benchmarks.

    python -m benchmarks.measurements           # after `python -m benchmarks.suite`
    python -m benchmarks.measurements --check   # exit status 1 if the document says something else

A table stands between `<!-- measured: SECTION -->` and `<!-- end -->`; all other text of the document is left as it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.claim import Claim
from benchmarks.claims import CLAIMS
from benchmarks.record import RESULTS, read_record

DOCUMENT = Path(__file__).parents[1] / "docs" / "measurements.md"
_TABLE = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    current = DOCUMENT.read_text()
    new = with_tables(current, RESULTS)
    if options.check:
        return int(new != current)
    DOCUMENT.write_text(new)
    return 0


def with_tables(document: str, results: Path) -> str:
    """The document with its tables as the records of a folder say."""
    return _TABLE.sub(lambda match: match[1] + table(match[2], results) + match[3], document)


def table(section: str, results: Path) -> str:
    """One table: a row for each claim of the section."""
    rows = [row(claim, results) for claim in CLAIMS if claim.section == section]
    return "\n".join(["| claim | measured | day | record |", "| --- | --- | --- | --- |", *rows, ""])


def row(claim: Claim, results: Path) -> str:
    record = read_record(claim.record, results)
    figures = " / ".join(map(number, claim.figures(record["result"])))
    link = f"[{claim.record}](../benchmarks/results/{claim.record}.json)"
    return f"| {claim.text} | {figures} {claim.unit} | {record['day']} | {link} |"


def number(figure: Any) -> str:
    """A figure with three digits, a count as it is; of a ratio its median, with its 95% interval."""
    if isinstance(figure, int):
        return str(figure)
    if isinstance(figure, dict):
        return f"{figure['median']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"
    return f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"


if __name__ == "__main__":
    sys.exit(main())
