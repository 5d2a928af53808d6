"""The numbers and the table of docs/other-models.md from the record of `every_type`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
OUT_OF_MEMORY = "out-of-memory"
"""What a row has in the place of an error where its process may have no more."""

NUMBERS = "## How many\n"
COLUMNS = "## What the table says\n"
START = "## The table\n"
HEADER = (
    "| model type | class | plan | sharded of layers (of all) | error on tp=2 | error on tp=4 | sequence parallel | "
    "own plan on tp=2 |"
)
_RULE = "| --- | --- | --- | --- | --- | --- | --- | --- |"
_REASONS = {
    "timeout": "not measured: too slow",
    "failed": "not measured: its process failed",
    "open": "runs small, not measured yet",
}
_COUNTS = (
    "| types with a class for | registered | run small | right on 2 and on 4 | of which half of layers or more | less "
    "| refused, or on 4 alone | not measured | wrong |"
)


def with_table(page: str, rows: Iterable[Row]) -> str:
    """The page, which ends with the table, with the numbers and the table of these rows in it."""
    ordered = sorted(rows, key=lambda row: row["type"].lower())
    before, columns = page[: page.index(NUMBERS)], page[page.index(COLUMNS) : page.index(START)]
    return before + numbers(ordered) + columns + table(ordered)


def table(rows: list[Row]) -> str:
    """A line for each type."""
    return "\n".join([START, HEADER, _RULE, *map(line_of, rows)]) + "\n"


def numbers(rows: list[Row]) -> str:
    """How many types there are, run small, are right, and are refused for which reasons: in words, and for each kind of
    class."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        for words in row.get("mappings", ()):
            groups.setdefault(words, []).append(row)
    barred = [row for row in rows if row.get("mappings")]
    lines = [line_of_numbers(words, members) for words, members in groups.items()]
    lines += [line_of_numbers("one of these", barred), line_of_numbers("anything", rows)]
    return "\n".join(
        [NUMBERS, summary(rows), "", _COUNTS, "| --- | " + "--- | " * 8, *lines, "", reasons(rows), "", ""]
    )


def line_of_numbers(words: str, rows: list[Row]) -> str:
    """The counts of some rows, with shares of those that run small."""
    counts = Counter(map(kind_of, rows))
    small = len(rows) - counts["unbuilt"]
    right = counts["half"] + counts["less"]
    columns = (
        f"{len(rows)} | {small} | {right} ({right / max(1, small):.0%}) | {counts['half']} "
        f"({counts['half'] / max(1, small):.0%})"
    )
    return f"| {words} | {columns} | {counts['less']} | {counts['refused']} | {counts['open']} | {counts['wrong']} |"


def kind_of(row: Row) -> str:
    """What a row counts as: `half` or `less` of the layers sharded, and right; `refused`; `wrong`; `open`;
    `unbuilt`."""
    if row["kind"] == "wrong" or "DIFFERS" in row.get("errors", {}).values():
        return "wrong"
    if OUT_OF_MEMORY in row.get("errors", {}).values():
        return "open"
    if is_proven(row):
        return "half" if row["layers"] >= 0.5 else "less"
    return "open" if row["kind"] in _REASONS else row["kind"] if row["kind"] == "unbuilt" else "refused"


def summary(rows: list[Row]) -> str:
    """The same for all types, in sentences."""
    counts = Counter(map(kind_of, rows))
    small, right = len(rows) - counts["unbuilt"], counts["half"] + counts["less"]
    packages = sum(row["kind"] == "unbuilt" and "needs a package" in row.get("reason", "") for row in rows)
    wrong = [row["type"] for row in rows if kind_of(row) == "wrong"]
    return (
        f"`transformers` registers {len(rows)} types with a class of model. {small} of them could be built and run "
        "small; "
        f"{counts['unbuilt']} could not: {packages} need a package that was not installed, the others a config or "
        "inputs that were not found, "
        f"and the table has what `transformers` said. Of the {small}, {right} have a plan that is right on 2 and on 4 "
        "ranks, of which "
        f"{counts['half']} shard at least half of the parameters of layers. {counts['refused']} are refused before "
        "anything runs, on 2 ranks or "
        f"on 4. {counts['open']} were not measured. {'Wrong: ' + ', '.join(wrong) if wrong else 'None is wrong'}."
    )


def reasons(rows: list[Row]) -> str:
    """The slugs of refused rows, the most frequent first."""
    slugs = Counter(_slug(row) for row in rows if kind_of(row) == "refused")
    return (
        f"Refused: {', '.join(f'{count} `{slug}`' for slug, count in slugs.most_common())}."
        if slugs
        else "None is refused."
    )


def _slug(row: Row) -> str:
    slugs = [error for error in row.get("errors", {}).values() if isinstance(error, str)]
    return str(slugs[0]) if slugs else str(row.get("reason", "")).partition(":")[0]


def is_proven(row: Row) -> bool:
    """Whether every proof of a row passed."""
    return bool(row.get("errors")) and all(isinstance(error, float) for error in row["errors"].values())


def line_of(row: Row) -> str:
    if "layers" not in row:
        reason = _REASONS.get(row["kind"]) or row.get("reason", "")
        return f"| {row['type']} | {row.get('class', '')} | {row['kind']}: {_short(reason)} | | | | | |"
    share = f"{row['layers']:.0%} ({row['all']:.0%})"
    errors = " | ".join(_error(row["errors"].get(tp)) for tp in ("2", "4"))
    own = _error(row["own"]) if row.get("own") else ""
    named = f"| {row['type']} | {row['class']} | {row['kind']} | {share} | {errors} |"
    return f"{named} {'yes' if row['sequence'] else 'no'} | {own} |"


def _error(value: Any) -> str:
    return f"{value:.0e}" if isinstance(value, float) else f"`{value}`"


def _short(text: str) -> str:
    """The first sentence of a reason, without what a table cannot have."""
    words = re.sub(r"\s+", " ", text.partition("\n")[0]).replace("|", "/")
    words = re.sub(r"^(\S+): no small version of \S+ runs: ", r"\1: ", words)
    return words if len(words) <= 140 else words[:137].rsplit(" ", 1)[0] + " ..."
