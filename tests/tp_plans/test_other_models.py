"""Models without a shipped plan: parity, or a named error before anything changes, as the published table has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tp_plans.other_models import HEADER, TYPES, outcome, with_table

PUBLISHED = Path(__file__).parent.parent.parent / "docs" / "other-models.md"


@pytest.mark.variants(every=12)
@pytest.mark.parametrize("model_type", TYPES)
def test_parity_or_a_named_error(model_type):
    kind, detail = outcome(model_type)
    assert kind in ("equal", "refused"), detail
    row = re.search(rf"^\| {model_type} \| (.*?) \| (.*?) \|$", PUBLISHED.read_text(), re.M)
    assert row, "not in the published table"
    assert row[1].startswith("equals" if kind == "equal" else "refused")
    if kind == "refused":
        assert row[2] == f"`{detail}`"


def test_a_new_table_replaces_the_old_one_only():
    page = PUBLISHED.read_text()
    start = page.index(HEADER)
    assert page.startswith("# ") and start > 0
    assert with_table(page, page[start:]) == page
    assert with_table(page, f"{HEADER}\n") == page[:start] + f"{HEADER}\n"
