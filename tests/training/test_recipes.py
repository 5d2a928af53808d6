"""Each recipe of `examples/` starts without arguments, learns, and has the losses of the same recipe on one process."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = {
    "pretrain": 2,  # losses that it prints
    "finetune": 3,
    "lora": 3,
    "qlora": 3,
    "dpo": 4,
    "distill": 4,
    "vision": 3,
    "mixture": 4,
    "long_context": 3,
    "own_model": 4,
}
MOST_LINES = 90
TIMEOUT_S = 150
IN_MINUTES = ("dpo", "distill")
pytestmark = pytest.mark.processes


def losses(folder: Path, recipe: str, ranks: int) -> list[float]:
    """What a recipe prints in a copy of the examples, on a mesh of so many ranks."""
    shutil.copytree(EXAMPLES, folder)
    for file in (folder / f"{recipe}.py", folder / "pretrain.yaml"):
        text, found = re.subn(
            r"((?:build_mesh\(\"cpu\"|mesh: \{).*?\b(?:dp|tp|cp)\W+)2\b", rf"\g<1>{ranks}", file.read_text()
        )
        assert found <= 1
        file.write_text(text)
    printed = run_script(folder / f"{recipe}.py", ranks, timeout_s=TIMEOUT_S)
    return [float(loss) for loss in re.findall(r"^step \d+  loss (\d\.\d+)", printed, re.MULTILINE)]


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in IN_MINUTES else pytest.mark.sweep) for name in RECIPES]
)
def test_a_recipe_has_the_losses_of_one_process(recipe, tmp_path):
    one, two = (losses(tmp_path / str(ranks), recipe, ranks) for ranks in (1, 2))
    assert len(one) == RECIPES[recipe] and min(one[1:]) < one[0]
    assert two == pytest.approx(one, rel=2e-3)


@pytest.mark.torch_free
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_short_and_says_how_it_starts(recipe):
    text = (EXAMPLES / f"{recipe}.py").read_text()
    assert len(text.splitlines()) < MOST_LINES
    assert f"torchrun --standalone --nproc-per-node 2 examples/{recipe}.py\n\nOn GPUs: " in text
