"""Every model type with experts: what the published table says of its plan is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tp_plans.mixtures import HEADER, candidates, row

PUBLISHED = (Path(__file__).parent.parent.parent / "docs" / "experts.md").read_text().partition(HEADER)[2]
ROWS = {line.split(" | ")[0].removeprefix("| "): line for line in PUBLISHED.splitlines() if " | " in line}
QUICK = "zaya"
"""A type that names its experts for `ep` alone."""


@pytest.mark.parametrize("model_type", [QUICK])
def test_a_row(model_type):
    assert row(model_type) == ROWS[model_type]


@pytest.mark.variants(every=1000)
@pytest.mark.parametrize("model_type", [name for name in ROWS if name not in (QUICK, "---")])
def test_every_row(model_type):
    assert row(model_type) == ROWS[model_type]


def test_no_result_is_wrong():
    assert len(ROWS) > 60 and not any("DIFFERS" in line or "FAILS" in line for line in ROWS.values())


@pytest.mark.sweep
def test_every_type_with_experts_has_a_row():
    """A type of a later release of `transformers` too. Types without a row have no model of their own, or no experts by
    default."""
    missing = [name for name in candidates() if name not in ROWS]
    assert not [name for name in missing if row(name) is not None]
    assert not [name for name in ROWS if name not in {*candidates(), "---"}]
