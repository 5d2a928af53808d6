"""The table of docs/other-models.md from the record of `every_type`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]
START = "## The table\n"
HEADER = "| model type | class | plan | sharded of layers (of all) | error on tp=2 | error on tp=4 | sequence parallel | own plan on tp=2 |"
_RULE = "| --- | --- | --- | --- | --- | --- | --- | --- |"
_REASONS = {"timeout": "not measured: too slow", "failed": "not measured: its process failed"}


def with_table(page: str, rows: Iterable[Row]) -> str:
    """The page, which ends with the table, with these rows in it."""
    return page[: page.index(START)] + table(sorted(rows, key=lambda row: row["type"].lower()))


def table(rows: list[Row]) -> str:
    """A summary, and a line for each type that has a class of model."""
    built = [row for row in rows if row["kind"] != "unbuilt"]
    lines = [START, summary(built), "", HEADER, _RULE, *map(line_of, built)]
    return "\n".join(lines) + "\n"


def summary(rows: list[Row]) -> str:
    """How many types a plan serves, and how much of their layers it shards."""
    proven = [row for row in rows if is_proven(row)]
    half = [row for row in proven if row["layers"] >= 0.5]
    wrong = [row["type"] for row in rows if row["kind"] == "wrong" or "DIFFERS" in str(row)]
    partly = len([row for row in rows if "errors" in row and row not in proven])
    return (
        f"{len(rows)} types were tried. {len(proven)} have a plan that is right on 2 and on 4 ranks, of which {len(half)} shard at least "
        f"half of the parameters of layers. {partly} are right on 2 ranks and refused on 4. The others are refused before anything "
        f"runs, or were not measured. {'Wrong: ' + ', '.join(wrong) if wrong else 'None is wrong'}."
    )


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
