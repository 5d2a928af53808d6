"""Each row of the tables of docs/trainers.md names a test."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_each_row_has_a_test():
    text = (HERE.parents[2] / "docs" / "trainers.md").read_text()
    named = re.findall(r"`(test_\w+)` \|$", text, re.MULTILINE)
    defined = {
        name
        for path in HERE.parents[1].rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 30 and set(named) <= defined, sorted(set(named) - defined)
