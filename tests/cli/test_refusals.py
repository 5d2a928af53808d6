"""Mistakes on the command line: each command prints the slug and the number or name in question, and its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from parallelize import Checkpointer
from parallelize.cli import main
from parallelize.terminal.console import ENVIRONMENT, MISTAKE
from tests.support.models import tiny_model


@pytest.fixture
def refusal(capsys):
    """Runs a command that must fail, and returns its slugs and its JSON output as one text."""

    def run(*arguments: object, status: int = MISTAKE) -> tuple[list[str], str]:
        assert main([*map(str, arguments), "--json"]) == status
        problems = json.loads(capsys.readouterr().out)["error"]
        return [problem["slug"] for problem in problems], json.dumps(problems, ensure_ascii=False)

    return run


def without_embedding() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8))


WITHOUT_EMBEDDING = f"{__name__}:{without_embedding.__name__}"


# -- models ---------------------------------------------------------------------------------------------------------------


def test_nothing_to_lint(refusal):
    slugs, output = refusal("lint")
    assert slugs == ["nothing-to-lint"] and "parallelize lint my.yaml" in output


def test_nothing_to_fit(refusal):
    slugs, output = refusal("fit", "--gpus", 8)
    assert slugs == ["no-model"] and "parallelize fit llama-3-8b --gpus 64" in output


@pytest.mark.parametrize(
    ("name", "expected"),
    [("lama", "did you mean `llama`"), ("align_text_model", "no model for the config of align_text_model")],
    ids=["misspelled", "part of a model"],
)
def test_names_of_no_model(name, expected, refusal):
    slugs, output = refusal("explain", name)
    assert slugs == ["unknown-model"] and expected in output


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "contains no config: [Errno 2]"),
        ("{", "contains no config: Expecting property name"),
        ("[]", "names no model_type"),
        ('{"hidden_size": 8}', "names no model_type"),
        ('{"model_type": "lama"}', "model type `lama`"),
    ],
    ids=["no file", "no JSON", "a list", "no type", "unknown type"],
)
def test_a_config_of_no_model(content, expected, tmp_path, refusal):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    slugs, output = refusal("explain", tmp_path)
    assert slugs == ["unknown-model"]
    assert expected in output and str(tmp_path / "config.json") in output


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_such_package:build", "no module is called 'no_such_package'"),
        ("json.no_such_module:build", "no module is called 'json.no_such_module'"),
        ("json:build", "json has no 'build'"),
        (":make", "no module is called ''"),
        (".x:make", "no module is called '.x'"),
        ("..:make", "no module is called '..'"),
    ],
)
def test_functions_that_do_not_exist(name, expected, refusal):
    slugs, output = refusal("explain", name)
    assert slugs == ["no-such-factory"]
    assert expected in output and "package.module:function" in output


@pytest.mark.parametrize("override", ["hidden_size", "=3"])
def test_an_override_without_a_key_or_a_value(override, refusal):
    slugs, output = refusal("explain", "llama", "--set", override)
    assert slugs == ["bad-override"]
    assert f"cannot read '{override}'" in output and "num_hidden_layers=2" in output


@pytest.mark.parametrize("from_file", [False, True])
def test_an_override_of_no_field(from_file, tmp_path, refusal):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    slugs, output = refusal("explain", tmp_path if from_file else "llama", "--set", "hidden_sise=8")
    assert slugs == ["unknown-config-field"]
    assert "LlamaConfig has no field 'hidden_sise'" in output and "did you mean `hidden_size`" in output


def test_a_model_whose_inputs_are_unknown(tmp_path, refusal):
    plan = tmp_path / "plan.yaml"
    plan.write_text("schema_version: 1\ntensor_parallel:\n  '0': colwise\n")
    slugs, output = refusal("explain", WITHOUT_EMBEDDING, "--plan", plan, "--mesh", "tp=2")
    assert slugs == ["unknown-inputs"]
    assert "Sequential has no embedding of ids" in output and "inputs" in output


# -- plans ----------------------------------------------------------------------------------------------------------------


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


# -- checkpoints ----------------------------------------------------------------------------------------------------------


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
