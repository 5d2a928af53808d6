"""The file of a run: every mistake at once, with line and column; overrides; the schema says what the loader reads."""

from __future__ import annotations

import os

import jsonschema
import pytest
import yaml

from parallelize.base.errors import LaunchError
from parallelize.base.mesh import MeshSpec
from parallelize.launch.config.run_config import FILE, run_schema, schema_text
from parallelize.launch.config.run_config_file import parse_run_config, read_run_config

pytestmark = pytest.mark.torch_free

GOOD = """\
model: {name: llama, set: {hidden_size: 64, tie_word_embeddings: false, rope: 1e4}, initialize: 3}
data: {function: "tests.launch.some_rows:rows", args: {size: 10, names: [a, b]}, sequence: 32, global_batch: 16, microbatch: 2}
mesh: {pp: 2, dp: 2, tp: 2}
options: {zero: 2, sequence_parallel: true, overlap: off}
optimizer: {lr: 3e-4, args: {betas: [0.9, 0.95]}, clip: 1}
schedule: {warmup_steps: 10, decay: cosine}
steps: 100
checkpoints: {folder: runs/a, every: 10}
anomalies: {nonfinite: rewind}
"""  # noqa: E501


def problems_of(text: str, *overrides: str) -> list[tuple[str, str]]:
    with pytest.raises(LaunchError) as raised:
        parse_run_config(text, "run.yaml", overrides)
    return [(problem.slug, problem.where) for problem in raised.value.problems]


def test_a_file_is_read_as_it_says():
    config = parse_run_config(GOOD)
    assert config.mesh == MeshSpec(pp=2, dp=2, tp=2)
    assert config.model.set == {"hidden_size": 64, "tie_word_embeddings": False, "rope": 1e4}
    assert config.data.args == {"size": 10, "names": ["a", "b"]} and config.optimizer.clip == 1.0
    assert config.options.explicit() == {"zero": 2, "sequence_parallel": True, "overlap": "off"}
    assert config.options_on(config.mesh).num_microbatches == 4


def test_a_model_may_be_text_and_auto_is_no_mesh():
    config = parse_run_config("model: gpt2\nmesh: auto\ndata: {function: 'tests.launch.some_rows:rows'}")
    assert config.model.name == "gpt2" and config.mesh is None


def test_arguments_replace_values_and_are_named_in_mistakes():
    config = parse_run_config(GOOD, "run.yaml", ["optimizer.lr=1e-2", "mesh=dp=4,tp=2", "metrics.every=5", "steps=7"])
    assert (config.optimizer.lr, config.mesh, config.metrics.every, config.steps) == (1e-2, MeshSpec(dp=4, tp=2), 5, 7)
    named = parse_run_config(
        "model: llama\ndata: {function: 'tests.launch.some_rows:rows'}", "run.yaml", ["model.initialize=5"]
    )
    assert (named.model.name, named.model.initialize) == ("llama", 5)
    assert problems_of(GOOD, "optimizer.lr=fast") == [("wrong-type", "argument optimizer.lr=fast")]
    assert problems_of(GOOD, "steps") == [("bad-override", "")]


def test_every_mistake_is_reported_at_its_place():
    text = GOOD.replace("zero: 2", "zero: 7").replace("steps: 100", "step: 100").replace("cosine", "cosin")
    text = text.replace("every: 10", "every: 0").replace("lr: 3e-4", "lr: no")
    assert problems_of(text) == [
        ("bad-zero-stage", "run.yaml:4:17"),
        ("wrong-type", "run.yaml:5:17"),
        ("bad-value", "run.yaml:6:37"),
        ("unknown-key", "run.yaml:7:1"),
        ("bad-value", "run.yaml:8:38"),
    ]


@pytest.mark.parametrize(
    ("change", "slugs"),
    [
        (("global_batch: 16", "global_batch: 15"), ["indivisible-batch"]),
        (("microbatch: 2", "microbatch: 3"), ["indivisible-batch"]),
        (("{zero: 2", "{num_microbatches: 2, zero: 2"), ["bad-value"]),
        (("microbatch: 2", "microbatch: 2, balance: joined"), ["bad-value"]),
        (("microbatch: 2", "balance: even"), ["bad-value"]),
        (
            ('function: "tests.launch.some_rows:rows", args: {size: 10, names: [a, b]}', "text: a, balance: rows"),
            ["bad-value", "no-such-file"],
        ),
        (("{zero: 2", "{expert_placement: absent.json, zero: 2"), ["bad-placement"]),
        (("checkpoints: {folder: runs/a, every: 10}", "seed: 1"), ["missing-key"]),
        (
            ('function: "tests.launch.some_rows:rows"', 'text: absent.txt, function: "tests.launch.some_rows:rows"'),
            ["no-such-file", "bad-value"],
        ),
        (("{pp: 2, dp: 2, tp: 2}", "pp=2,tp=2"), ["no-data-axis"]),
        (("{pp: 2, dp: 2, tp: 2}", "pp=2;dp"), ["bad-mesh"]),
        (("model: ", "plan: "), ["missing-key", "wrong-type"]),
        (("steps: 100", "steps: 100\nsteps: 200"), ["duplicate-key"]),
        (("every: 10", "keep_every: 10"), ["bad-value"]),
        (("mesh:", "schema_version: 9\nmesh:"), ["unknown-version"]),
        (("steps: 100", "steps: !!int 100"), ["no-tags"]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_have_names(change, slugs):
    assert sorted(slug for slug, _ in problems_of(GOOD.replace(*change))) == sorted(slugs)


def test_a_file_that_is_not_there_has_a_name(tmp_path):
    with pytest.raises(LaunchError, match="no-such-run"):
        read_run_config(tmp_path / "absent.yaml")


def test_the_schema_is_that_of_the_loader():
    assert FILE.read_text() == schema_text()
    jsonschema.Draft202012Validator.check_schema(run_schema())
    jsonschema.validate(
        yaml.safe_load(
            GOOD.replace("overlap: off", 'overlap: "off"').replace("3e-4", "3.0e-4").replace("1e4", "1.0e+4")
        ),
        run_schema(),
    )
    for wrong in ({"steps": 0}, {"stepz": 1}, {"schedule": {"decay": "cosin"}}, {"options": {"zeros": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, run_schema())


def test_a_pipe_is_no_run(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(LaunchError, match="unsafe-path: is not a regular file"):
        read_run_config(tmp_path / "run.yaml")


def test_words_of_python_and_short_names_are_read():
    text = GOOD.replace("sequence_parallel: true", "sequence_parallel: True, dtype: bf16, reduce_dtype: None")
    text = text.replace("tie_word_embeddings: false", "tie_word_embeddings: False, pad: None, other: ~, quoted: 'None'")
    config = parse_run_config(text, "run.yaml", ["optimizer.clip=None", "plan=null", "checkpoints.keep_last=~"])
    assert config.model.set["tie_word_embeddings"] is False and config.model.set["quoted"] == "None"
    assert config.model.set["pad"] is None is config.model.set["other"]
    assert config.options.explicit()["sequence_parallel"] is True and config.options.dtype == "bfloat16"
    assert config.options.reduce_dtype is None is config.optimizer.clip and config.plan == ""
    assert config.checkpoints.keep_last is None and config.checkpoints.every == 10
    assert problems_of(GOOD, "optimizer.lr=None") == [("wrong-type", "argument optimizer.lr=None")]
    assert problems_of(GOOD, "options.dtype=bf15") == [("bad-option", "argument options.dtype=bf15")]
    assert problems_of(GOOD, "options.sequence_parallel='True'") == [
        ("wrong-type", "argument options.sequence_parallel='True'")
    ]
