"""The table of every model type: what it says is what was measured, and a row is measured again here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.every_type import NAME, row_of
from benchmarks.every_type_table import line_of, numbers, summary, table, with_table
from benchmarks.record import read_record

PAGE = Path(__file__).parent.parent.parent / "docs" / "other-models.md"
ROWS = {row["type"]: row for row in read_record(NAME)["result"]}
QUICK = "bitnet"
"""Of which a part is left whole."""


def test_the_page_has_the_rows_of_the_record():
    assert with_table(PAGE.read_text(), ROWS.values()) == PAGE.read_text()


def test_no_plan_is_wrong():
    assert not [row["type"] for row in ROWS.values() if row["kind"] == "wrong" or "DIFFERS" in str(row)]


def test_what_a_row_says():
    row = {"type": "a", "class": "A", "kind": "derived", "errors": {"2": 1e-15, "4": "uneven-heads"}, "sequence": True}
    row |= {"own": "no-plan-for-model"}
    row |= {"layers": 0.514, "all": 0.5}
    refused = {
        "type": "b",
        "kind": "refused",
        "reason": "untraceable-model: no small version of b runs: ValueError: a | b",
    }
    assert line_of(row) == "| a | A | derived | 51% (50%) | 1e-15 | `uneven-heads` | yes | `no-plan-for-model` |"
    assert line_of(refused) == "| b |  | refused: untraceable-model: ValueError: a / b | | | | | |"
    assert "| c |" in table([{"type": "c", "kind": "unbuilt"}])


def test_what_the_numbers_say():
    masked = {"mappings": ["masked language models"]}
    half = {"type": "a", "kind": "derived", "errors": {"2": 1e-15, "4": 1e-15}, "layers": 0.5, **masked}
    less, on_two = (
        {**half, "type": "b", "layers": 0.4},
        {**half, "type": "c", "errors": {"2": 1e-15, "4": "uneven-heads"}},
    )
    refused = {"type": "d", "kind": "refused", "reason": "nothing-to-shard: no linear"}
    unbuilt = {"type": "e", "kind": "unbuilt", "reason": "needs a package: PIL"}
    text = numbers([half, less, on_two, refused, unbuilt, {"type": "f", "kind": "timeout"}])
    assert (
        "registers 6 types" in text and "5 of them could be built and run small; 1 could not: 1 need a package" in text
    )
    assert "| masked language models | 3 | 3 | 2 (67%) | 1 (33%) | 1 | 1 | 0 | 0 |" in text
    assert "| anything | 6 | 5 | 2 (40%) | 1 (20%) | 1 | 2 | 1 | 0 |" in text
    assert "Refused: 1 `uneven-heads`, 1 `nothing-to-shard`." in text and "None is wrong" in text
    assert "0 are refused" in summary([{**half, "errors": {"2": 1e-15, "4": "out-of-memory"}}])
    assert "Wrong: a" in summary([{**half, "errors": {"2": "DIFFERS", "4": 1e-15}}])


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", [QUICK])
def test_a_row_is_measured_again(model_type):
    row, record = row_of(model_type), ROWS[model_type]
    assert line_of(row).split(" | ")[:4] == line_of(record).split(" | ")[:4]
