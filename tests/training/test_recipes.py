"""Each recipe of `examples/` starts without arguments, learns, and has the losses, or rewards, of the same recipe on
one process."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.scripts import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = {
    "pretrain": 2,  # losses that it prints, or rewards
    "finetune": 3,
    "lora": 3,
    "qlora": 3,
    "dpo": 4,
    "grpo": 4,
    "distill": 4,
    "vision": 3,
    "vision_text": 3,
    "mixture": 4,
    "long_context": 3,
    "own_model": 4,
    "flow_matching": 3,
    "balanced_rows": 4,
    "flex_attention": 3,
}
MOST_LINES = 120
OTHER_MESHES = {
    "tp": (2, "tp=2", "zero=0"),
    "dp-tp-zero0": (4, "dp=2, tp=2", "zero=0"),
    "dp-tp-zero1": (4, "dp=2, tp=2", "zero=1"),
    "dp-zero3": (2, "dp=2", "zero=3"),
}
"""Ranks, mesh and ZeRO stage of `grpo`, which has dp 2 and ZeRO 2 as written."""
TWO_AXES = "cp=2, tp=2"
TIMEOUT_S = 150
IN_MINUTES = ("dpo", "distill", "flex_attention")
pytestmark = pytest.mark.processes


def losses(folder: Path, recipe: str, ranks: int) -> list[float]:
    """What a recipe prints in a copy of the examples, on a mesh of so many ranks along each of its axes."""
    shutil.copytree(EXAMPLES, folder)
    script = folder / f"{recipe}.py"
    if TWO_AXES in (text := script.read_text()):
        script.write_text(text.replace(TWO_AXES, f"cp={ranks}, tp={ranks}"))
        return printed_by(script, ranks**2)
    for file in (folder / f"{recipe}.py", folder / "pretrain.yaml"):
        text, found = re.subn(
            r"((?:build_mesh\(\"cpu\"|mesh: \{).*?\b(?:dp|tp|cp)\W+)2\b", rf"\g<1>{ranks}", file.read_text()
        )
        assert found <= 1
        file.write_text(text)
    return printed_by(script, ranks)


def printed_by(script: Path, ranks: int) -> list[float]:
    printed = run_script(script, ranks, timeout_s=TIMEOUT_S)
    return [float(value) for value in re.findall(r"^step \d+  (?:loss|reward) (\d\.\d+)", printed, re.MULTILINE)]


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[] if name in IN_MINUTES else pytest.mark.sweep) for name in RECIPES]
)
def test_a_recipe_has_the_losses_of_one_process(recipe, tmp_path):
    one, two = (losses(tmp_path / str(ranks), recipe, ranks) for ranks in (1, 2))
    learned = max(one[1:]) > one[0] + 0.1 if recipe == "grpo" else min(one[1:]) < one[0]
    assert len(one) == RECIPES[recipe] and learned
    assert two == pytest.approx(one, rel=2e-3)


def rewards(folder: Path, ranks: int, mesh: str, zero: str) -> list[float]:
    """Of the first five steps of `grpo`. All its answers have the full length, as ZeRO 3 needs it."""
    shutil.copytree(EXAMPLES, folder)
    text = (folder / "grpo.py").read_text()
    changes = {"dp=2)": f"{mesh})", "zero=2,": f"{zero},", "eos_token_id=END": "eos_token_id=[]"}
    for old, new in {**changes, "step % 5": "step % 1", "step == 20": "step == 5"}.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "grpo.py").write_text(text)
    return printed_by(folder / "grpo.py", ranks)


@pytest.mark.sweep
@pytest.mark.parametrize("where", OTHER_MESHES)
def test_rewards_do_not_depend_on_the_mesh(where, tmp_path):
    """One other token of 768 in a step would be seen: 1 / 768 = 1.3e-3."""
    one, many = rewards(tmp_path / "one", 1, "tp=1", "zero=0"), rewards(tmp_path / "many", *OTHER_MESHES[where])
    assert len(one) == 5 and len(set(one)) == 5
    assert many == pytest.approx(one, abs=5e-4)


@pytest.mark.torch_free
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_short_and_says_how_it_starts(recipe):
    text = (EXAMPLES / f"{recipe}.py").read_text()
    assert len(text.splitlines()) < MOST_LINES
    ranks = 4 if TWO_AXES in text else 2
    assert f"torchrun --standalone --nproc-per-node {ranks} examples/{recipe}.py\n\nOn GPUs: " in text
