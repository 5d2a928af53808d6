"""Models nobody planned for: parity or a named error before anything changes, as the published table says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plans.other_models import TYPES, outcome

PUBLISHED = Path(__file__).parent.parent.parent / "docs" / "other-models.md"


@pytest.mark.parametrize("model_type", TYPES)
def test_parity_or_a_named_error(model_type):
    kind, detail = outcome(model_type)
    assert kind in ("equal", "refused"), detail
    row = re.search(rf"^\| {model_type} \| (.*?) \| (.*?) \|$", PUBLISHED.read_text(), re.M)
    assert row, "not in the published table"
    assert row[1].startswith("equals" if kind == "equal" else "refused")
    if kind == "refused":
        assert row[2] == f"`{detail}`"
