"""The scripts of docs/coming-from.md: the one before and the one after print the same losses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.scripts import run_script

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
FILE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = dict(FILE.findall(PAGE.read_text()))
PAIRS = {"torch": (4, 10), "accelerate": (2, 8), "trainer": (2, 8), "titan": (4, 10)}
"""Of each pair of scripts: the ranks, and the losses that it prints."""
TIMEOUT_S = 120
LOSS = re.compile(r"\bloss(?:'?:)? '?(\d+\.\d+)")
pytestmark = [pytest.mark.processes, pytest.mark.sweep, pytest.mark.on_cpus("the page says cpu")]


def losses(folder: Path, script: str, ranks: int) -> list[float]:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return [float(loss) for loss in LOSS.findall(run_script(folder / script, ranks, timeout_s=TIMEOUT_S))]


@pytest.mark.parametrize("library", PAIRS)
def test_a_script_before_and_after_has_the_same_losses(library, tmp_path):
    if library in ("accelerate", "trainer"):
        pytest.importorskip("accelerate")
    ranks, count = PAIRS[library]
    before, after = (losses(tmp_path, f"{library}_{time}.py", ranks) for time in ("before", "after"))
    assert len(before) == count and before[-1] < before[0]
    assert after == pytest.approx(before, rel=1e-3)


@pytest.mark.torch_free
def test_every_script_of_the_page_is_run():
    assert {name for name in FILES if "_model" not in name} == {
        f"{k}_{t}.py" for k in PAIRS for t in ("before", "after")
    }
    assert PAGE.read_text().count("```python\n") == len(FILES)
