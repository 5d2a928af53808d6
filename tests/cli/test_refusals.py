"""Mistakes on the command line: each command prints the slug and the number or name in question, and its exit
status."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallelize import Checkpointer
from parallelize.base.terminal.console import ENVIRONMENT
from tests.support.models import tiny_model
from tests.support.refused import refused_command


@pytest.fixture
def refusal(capsys):
    return partial(refused_command, capsys)


# -- models ------------------------------------------------------------------------------------------------------------


def test_nothing_to_lint(refusal):
    slugs, output = refusal("lint")
    assert slugs == ["nothing-to-lint"] and "parallelize lint my.yaml" in output


def test_nothing_to_fit(refusal):
    slugs, output = refusal("fit", "--gpus", 8)
    assert slugs == ["no-model"] and "parallelize fit llama-3-8b --gpus 64" in output


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_plan_that_says_more_than_transformers_can(refusal):
    slugs, output = refusal("plans", "export", "phi3")
    assert slugs == ["no-equal-word"] * 3 + ["lossy-export"]
    assert "qkv_proj: colwise(heads + kv_heads + kv_heads): no word is for chunks of several sizes" in output
    assert "num_key_value_heads: kv_heads: attributes stay as they are there" in output
    assert "3 rules have no equivalent" in output and "--lossy" in output and "phi3.yaml:" in output


def test_a_plan_of_sequence_parallelism_by_default(tmp_path, refusal):
    path = tmp_path / "plan.yaml"
    rules = "tensor_parallel: {model.layers.*.up: colwise}\nsequence_parallel: {layers: model.layers}\n"
    path.write_text(f"schema_version: 1\nbase: model\n{rules}defaults: {{sequence_parallel: true}}\n")
    slugs, output = refusal("plans", "export", path)
    assert slugs == ["no-equal-word", "lossy-export"]
    assert "sequence parallelism is on by default" in output and str(path) in output


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: Path) -> None:
    with Checkpointer(folder, tiny_model("llama")) as checkpoints:
        checkpoints.save(7)


def save_hub_folder(folder: Path) -> None:
    folder.mkdir()
    save_file({"model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')


@pytest.mark.parametrize(("verb", "save"), [("to-hf", save_checkpoint), ("from-hf", save_hub_folder)])
def test_names_of_tensors_need_transformers(verb, save, tmp_path, monkeypatch, refusal):
    save(tmp_path / "source")
    monkeypatch.setitem(sys.modules, "transformers", None)
    slugs, output = refusal("checkpoint", verb, tmp_path / "source", tmp_path / "target", status=ENVIRONMENT)
    assert slugs == ["no-transformers"]
    assert "LlamaForCausalLM is a model of transformers" in output and "pip install transformers" in output
    assert not (tmp_path / "target").exists()
