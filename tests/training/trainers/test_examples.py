"""Each script of `examples/` runs as a newcomer runs it, and prints the same losses on every mesh."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.scripts import run_script

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = [pytest.mark.processes, pytest.mark.sweep]


@pytest.fixture
def run(tmp_path):
    """Runs a script in a copy of the folder, whose runs other scripts of the test continue."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")

    def runs(script, world_size, *arguments):
        return run_script(tmp_path / "examples" / script, world_size, *arguments, timeout_s=150)

    return runs


def losses(text):
    return re.findall(r"loss (\d\.\d{4})", text)


def test_the_loop_to_copy(run, tmp_path):
    settings = tmp_path / "examples" / "pretrain.yaml"
    settings.write_text(settings.read_text().replace("{tp: 2}", "{pp: 2, tp: 2}"))
    printed = run("pretrain.py", 4)
    assert re.findall(r"step (\d+)", printed) == ["20", "40"] and len(losses(printed)) == 2
    text = settings.read_text().replace("{pp: 2, tp: 2}", "{dp: 2}").replace("  zero: 0\n", "  zero: 3\n")
    settings.write_text(text.replace("steps: 40", "steps: 60"))
    assert re.findall(r"step (\d+)", run("pretrain.py", 2, "pretrain.yaml")) == ["60"]  # resumes, on another mesh
    assert (tmp_path / "examples/runs/pretrain/weights-60/model.safetensors").is_file()


def test_the_trainer_of_transformers(run, tmp_path):
    pytest.importorskip("accelerate")
    first = run("hf_trainer.py", 4, "dp=2,tp=2")
    assert re.findall(r"'eval_loss': '(\d\.\d+)'", first)
    for step in (40,):
        shutil.rmtree(tmp_path / f"examples/runs/hf_trainer/checkpoint-{step}")
    second = run("hf_trainer.py", 2, "pp=2", "resume")
    last = re.compile(r"'loss': '(\d\.\d+)'")
    assert last.findall(second)[-2:] == last.findall(first)[-2:]
    assert (tmp_path / "examples/runs/hf_trainer/final/model.safetensors").is_file()


def test_sft_of_trl(run):
    pytest.importorskip("trl")
    last = re.compile(r"'loss': '(\d\.\d+)'")
    assert last.findall(run("sft_trainer.py", 2, "tp=2")) == last.findall(run("sft_trainer.py", 2, "dp=2"))


def test_accelerate_and_fabric(run):
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning_fabric", exc_type=ImportError)
    beside = losses(run("accelerate_loop.py", 2, "dp=2"))
    assert len(beside) == 2 and losses(run("fabric_loop.py", 4, "2", "2")) == beside


def test_the_trainer_of_lightning(run):
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    printed = losses(run("lightning_trainer.py", 4, "2", "2"))
    assert len(printed) == 2 and losses(run("fabric_loop.py", 2, "2", "1")) == printed
