"""A config.json that comes from anywhere is refused at once, by its file, what is wrong and a fix; or it is a model's.

Nothing of it runs, nothing waits, and no command ends in a traceback: each case is one that did one of these.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallelize.base.errors import ModelError
from parallelize.plan.models.config_limits import config_problems
from parallelize.plan.models.model_source import read_model
from parallelize.plan.models.transformers_models import KNOWN, config_of_file
from tests.support.refused import refused, refused_command

SMALL: dict[str, Any] = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
)
ALARM_S = 30  # a case that is not refused would run for minutes, or for ever


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"not refused within {ALARM_S} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(ALARM_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def refusal(capsys):
    return partial(refused_command, capsys)


def written(folder: Path, content: Any) -> Path:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "config.json").write_bytes(data)
    return folder


# -- values -----------------------------------------------------------------------------------------------------------

VALUES = [
    ({"num_hidden_layers": 100_000}, "num_hidden_layers is 100,000, and at most 1,024"),
    ({"num_hidden_layers": 10**12}, "at most 1,024"),
    ({"num_hidden_layers": 0}, "must be at least 1"),
    ({"hidden_size": 0}, "hidden_size is 0, and must be at least 1"),
    ({"hidden_size": -1}, "must be at least 1"),
    ({"hidden_size": 10**12}, "at most 1,048,576"),
    ({"hidden_size": 10**400}, "an integer of 1329 bits"),
    ({"intermediate_size": 10**18}, "at most 1,048,576"),
    ({"num_key_value_heads": 10**12}, "at most 1,048,576"),
    ({"head_dim": 10**12}, "at most 1,048,576"),
    ({"vocab_size": 0}, "must be at least 1"),
    ({"vocab_size": 10**18}, "at most 2,147,483,647"),
    ({"max_position_embeddings": -1}, "must be at least 1"),
    ({"num_labels": 10**9}, "at most 1,048,576"),
    ({"model_type": "gpt2", "n_embd": 0}, "n_embd is 0, and must be at least 1"),
    ({"model_type": "gpt2", "n_layer": 10**5}, "n_layer is 100,000"),
    ({"model_type": "t5", "num_layers": 10**12}, "num_layers is 1,000,000,000,000"),
    ({"model_type": "swin", "depths": [2, 10**6]}, "depths[1] is 1,000,000"),
    ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**5}}, "text_config.num_hidden_layers"),
    ({"model_type": "mixtral", "num_local_experts": 10**9}, "the largest published mixtures"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN, with which every output is"),
    ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_parameters.rope_theta is NaN"),
    ({"architectures": "LlamaForCausalLM"}, "not a list of names"),
    ({"architectures": [1]}, "not a list of names"),
    ({"architectures": 5}, "not a list of names"),
    ({"architectures": ["NoSuchModel"]}, "name no model of transformers"),
    ({"architectures": ["pipeline"]}, "name no model of transformers"),
    ({"architectures": ["__name__"]}, "name no model of transformers"),
    ({"architectures": ["LlamaConfig"]}, "name no model of transformers"),
    ({"architectures": ["AutoModel"]}, "name no model of transformers"),
    ({"_attn_implementation": "someone/kernels"}, "a repository of code"),
    ({"nested": json.loads("[" * 200 + "]" * 200)}, "nested more than 64 levels deep"),
]


@pytest.mark.parametrize(("fields", "expected"), VALUES, ids=[str(fields)[:40] for fields, _ in VALUES])
def test_values_that_no_model_has(fields, expected, tmp_path, refusal):
    content = fields if "model_type" in fields else {**SMALL, **fields}
    slugs, output = refusal("explain", written(tmp_path, content), "--mesh", "tp=2")
    assert slugs == ["bad-config"]
    assert expected in output and str(tmp_path) in output and '"fix": ""' not in output


@pytest.mark.parametrize(
    ("fields", "slug"),
    [
        ({"hidden_size": [64]}, "unknown-model"),
        ({"num_hidden_layers": "2"}, "unknown-model"),
        ({"hidden_act": "os.system"}, "unbuildable-model"),
        ({"head_dim": 0}, "unbuildable-model"),
        ({"rope_parameters": {"rope_type": "none", "rope_theta": 1e4}}, "unbuildable-model"),
        ({"pad_token_id": 10**6}, "unbuildable-model"),
        ({"architectures": ["BertModel"]}, "unbuildable-model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_that_transformers_does_not_accept(fields, slug, tmp_path, refusal):
    for command in (("explain",), ("plans", "import")):
        slugs, output = refusal(*command, written(tmp_path, {**SMALL, **fields}))
        assert slugs == [slug] and str(tmp_path) in output


@pytest.mark.parametrize("override", ["num_hidden_layers=100000", "num_hidden_layers=1000000000000", "vocab_size=0"])
@pytest.mark.parametrize("from_file", [True, False])
def test_overrides_have_the_same_limits(override, from_file, tmp_path, refusal):
    name = written(tmp_path, SMALL) if from_file else "llama"
    assert refusal("explain", name, "--set", override)[0] == ["bad-config"]


@pytest.mark.parametrize("model_type", [[], {}, 5, None, "", "nosuch", "llama\0", "\ud800"], ids=repr)
def test_model_types_that_do_not_exist(model_type, tmp_path, refusal):
    code = {"AutoConfig": "evil.Config"}  # transformers would ask on the terminal whether to run it
    content = {**SMALL, "model_type": model_type, "auto_map": code}
    assert refusal("explain", written(tmp_path, content))[0] == ["unknown-model"]


def test_code_beside_a_config_does_not_run(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    config = config_of_file(written(tmp_path, {**SMALL, "auto_map": code}), {})
    assert type(config).__module__.startswith("transformers.models.llama")


# -- files ------------------------------------------------------------------------------------------------------------

FILES = {
    "a list": b"[]",
    "text": b'"llama"',
    "a number": b"5",
    "null": b"null",
    "empty": b"",
    "truncated": b'{"model_type": "lla',
    "a key twice": b'{"model_type": "llama", "hidden_size": 64, "hidden_size": 128}',
    "nested lists": b'{"model_type": "llama", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "many digits": b'{"model_type": "llama", "hidden_size": ' + b"9" * 10_000 + b"}",
    "no UTF-8": b'\xff\xfe{"model_type": "llama"}',
    "NUL": b'{"model_type": "llama"}\0',
}


def made(folder: Path, kind: str) -> Path:
    """A folder with a config.json of this kind."""
    path = folder / "config.json"
    if kind in FILES:
        path.write_bytes(FILES[kind])
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to({"a cycle": "config.json", "nowhere": "none", "a device": "/dev/zero"}[kind])
    return folder


KINDS = [*FILES, "a pipe", "a folder", "sparse", "a cycle", "nowhere", "a device"]


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_contain_no_config(kind, tmp_path, refusal):
    slugs, output = refusal("explain", made(tmp_path, kind))
    assert slugs == ["unknown-model"] and "contains no config" in output and str(tmp_path) in output
    assert refusal("plans", "import", tmp_path)[0] == ["bad-plan-source"]


COMMANDS = [("lint", "llama", "--model"), ("fit", "--gpus", "2"), ("verify", "--mesh", "tp=2"), ("explain",)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("kind", ["a pipe", "null"])
def test_every_command_reads_configs_alike(command, kind, tmp_path, refusal):
    assert refusal(*command, made(tmp_path, kind) / "config.json")[0] == ["unknown-model"]


@pytest.mark.parametrize(
    ("content", "slug"),
    [
        ({**SMALL, "num_hidden_layers": 100_000}, "bad-config"),
        ({**SMALL, "hidden_act": "os.system"}, "unbuildable-model"),
        ({**SMALL, "architectures": 5}, "bad-json"),
        ({**SMALL, "model_type": []}, "bad-json"),
        ("text", "bad-json"),
        (None, "unsafe-path"),
    ],
    ids=["layers", "activation", "architectures", "model type", "text", "a pipe"],
)
def test_folders_of_hugging_face(content, slug, tmp_path, refusal):
    folder = tmp_path / "folder"
    folder.mkdir()
    if content is None:
        made(folder, "a pipe")
    else:
        written(folder, content)
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    assert refusal("checkpoint", "from-hf", folder, tmp_path / "run")[0] == [slug]
    if slug in ("bad-json", "unsafe-path"):  # it builds nothing
        assert refusal("checkpoint", "inspect", folder)[0] == [slug]


# -- what is no attack ------------------------------------------------------------------------------------------------


def test_a_link_to_a_config_is_followed(tmp_path):
    written(tmp_path, SMALL)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").symlink_to(tmp_path / "config.json")
    assert config_of_file(tmp_path / "other", {}).hidden_size == 64


def test_published_sizes_and_numbers_that_are_no_sizes_are_accepted():
    for _, sizes in KNOWN.values():
        assert not config_problems(sizes)
    assert not config_problems({"rope_theta": 10**11, "rope_parameters": {"rope_theta": 10**11}, "pad_token_id": -1})
    assert not config_problems(
        {"time_step_limit": [0.0, float("inf")], "sliding_window": None, "num_hidden_layers": 1000}
    )


@pytest.mark.sweep
def test_the_defaults_of_every_config_of_transformers_are_accepted():
    from transformers import CONFIG_MAPPING

    tried = 0
    for model_type in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # two of them do not accept their own defaults
            continue
        tried += 1
        assert not config_problems(config.to_dict(), model_type, config.attribute_map)
    assert tried > 300


def test_architectures_may_be_left_out(tmp_path):
    assert read_model(written(tmp_path, {**SMALL, "architectures": None})).config.hidden_size == 64
    with refused(ModelError, "bad-config", "remove `architectures`"):
        read_model(written(tmp_path, {**SMALL, "architectures": ["MyLlamaForCausalLM"]}))
