"""The table of every model type: what it says is what was measured, and a row is measured again here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.every_type import NAME, row_of
from benchmarks.every_type_table import START, line_of, summary, table, with_table
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
    assert "2 types were tried. 0 have a plan" in summary([row, refused]) and "1 are right on 2 ranks" in summary([row])
    assert table([row, {"type": "c", "kind": "unbuilt"}]).startswith(START) and "| c |" not in table(
        [{"type": "c", "kind": "unbuilt"}]
    )


@pytest.mark.parametrize("model_type", [QUICK])
def test_a_row_is_measured_again(model_type):
    row, record = row_of(model_type), ROWS[model_type]
    assert line_of(row).split(" | ")[:4] == line_of(record).split(" | ")[:4]
