"""Texts that name no model: each is refused by a slug, with the text in question."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from tests.support.refused import refused_command


@pytest.fixture
def refusal(capsys):
    return partial(refused_command, capsys)


def without_embedding() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8))


WITHOUT_EMBEDDING = f"{__name__}:{without_embedding.__name__}"


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
        (None, "contains no config: config.json does not exist"),
        ("{", "contains no config: is not valid JSON: Expecting property name"),
        ("[]", "contains no config: contains a JSON list"),
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
