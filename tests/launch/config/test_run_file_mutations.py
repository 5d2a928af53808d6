"""Every key of a run with values that it cannot have: refused with line, column, what and fix, or accepted as the
schema says.

The JSON schema is the other opinion. What it accepts and the loader refuses is a name of something that does not exist,
values that do not fit each other, or text that YAML 1.1 reads as another number than it shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

import jsonschema
import pytest
import yaml

from parallelize.base.errors import LaunchError, Problem
from parallelize.launch.config.run_config import RunConfig, run_schema
from parallelize.launch.config.run_config_file import parse_run_config
from parallelize.plan.options import NAMES

pytestmark = pytest.mark.torch_free

BASE = {
    "model": ["name: llama", "set: {hidden_size: 64}"],
    "data": ['function: "tests.launch.some_rows:rows"', "global_batch: 16"],
    "mesh": "dp=2,tp=2",
}
VALUES = (
    *(
        "-1",
        "0",
        "1",
        "1e30",
        "1e999",
        "9" * 12,
        "9" * 2000,
        "0x10",
        "007",
        ".nan",
        "'1'",
        "null",
        "true",
        "2026-01-01",
    ),
    *(
        "nope",
        '""',
        "a:b",
        '"tp=3;"',
        "[1]",
        "[a, b]",
        "{}",
        "{a: 1}",
        "{a: 1, a: 2}",
        "{a: .inf}",
        "*a",
        "!!str x",
        "[a",
    ),
)
AS_YAML_READS_IT = {"0x10", "007", ".nan", "{a: .inf}", "9" * 2000}
NOT_OF_A_SCHEMA = {
    *(
        "missing-key",
        "no-such-file",
        "no-such-object",
        "no-such-factory",
        "no-such-plan",
        "unknown-hardware",
        "unknown-format",
    ),
    *(
        "bad-mesh",
        "unknown-axis",
        "unknown-schedule",
        "indivisible-batch",
        "no-overlap",
        "bad-value",
        "bad-stages-per-rank",
    ),
    *("too-large", "unknown-version", "no-tags", "duplicate-key"),
}


def all_keys() -> Iterator[str]:
    for field in (field for field in fields(RunConfig) if field.metadata):
        yield field.name
        if section := field.metadata["kind"].of:
            yield from (f"{field.name}.{inner.name}" for inner in fields(section))
    yield from (f"options.{name}" for name in NAMES)


def mutated(key: str, value: str) -> tuple[str, int]:
    """(the file with this value, its line)."""
    sections = dict(BASE)
    section, _, name = key.partition(".")
    if name:
        inner = [line for line in sections.get(section, ()) if not line.startswith(f"{name}:")]
        inner += ["folder: runs"] if section == "checkpoints" and name != "folder" else []
        sections[section] = [*inner, f"{name}: {value}"]
    else:
        sections[section] = value
    lines = []
    for head, body in sections.items():
        lines += [f"{head}: {body}"] if isinstance(body, str) else [f"{head}:", *(f"  {line}" for line in body)]
    return "\n".join(lines) + "\n", 1 + next(
        number for number, line in enumerate(lines) if line.strip() == f"{name or section}: {value}"
    )


def refusal_of(text: str, *overrides: str) -> tuple[Problem, ...]:
    try:
        parse_run_config(text, "run.yaml", overrides)
    except LaunchError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.sweep)])
def test_each_value_is_refused_at_its_line_or_accepted_as_the_schema_says(every):
    validator = jsonschema.Draft202012Validator(run_schema())
    mutations = [(key, value) for key in all_keys() for value in VALUES][::every]
    assert len(mutations) > 150
    for key, value in mutations:
        text, line = mutated(key, value)
        problems = refusal_of(text)
        try:
            allowed = validator.is_valid(yaml.safe_load(text))
        except (yaml.YAMLError, ValueError):  # ValueError: more digits than Python reads
            allowed = False
        if not problems:
            assert allowed or value == "1e30", (key, value)  # YAML 1.1 reads 1e30 as text
            continue
        assert all(problem.what and problem.fix for problem in problems), problems
        assert all(re.fullmatch(r"run\.yaml:\d+:\d+", problem.where) for problem in problems), problems
        lines = {int(problem.where.split(":")[1]) for problem in problems}
        assert value == "[a" or line in lines or (allowed and key.startswith("options.")), problems  # or at the mesh
        if allowed and value not in AS_YAML_READS_IT:
            assert {problem.slug for problem in problems} <= NOT_OF_A_SCHEMA, problems


@pytest.mark.parametrize("every", [47, pytest.param(3, marks=pytest.mark.sweep)])
def test_arguments_are_refused_as_values_of_the_file_are(every):
    base, _ = mutated("steps", "5")
    for key, value in [(key, value) for key in all_keys() if key not in BASE for value in VALUES][::every]:
        problems = refusal_of(base, f"{key}={value}")
        in_file = refusal_of(mutated(key, value)[0])
        if key.startswith("checkpoints."):
            assert bool(problems) >= bool(in_file), (key, value)  # the base has no folder of checkpoints
            continue
        assert bool(problems) == bool(in_file), (key, value, problems, in_file)
        for problem in problems:
            assert problem.where.startswith((f"argument {key}=", "run.yaml:")), problem
        if problems and problems[0].slug in ("wrong-type", "bad-option"):
            assert problems[0].where.startswith(f"argument {key}="), problems


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("", "empty-plan"),
        ("- a\n", "wrong-type"),
        ("nope\n", "wrong-type"),
        ("? [a]\n: 1\nmodel: llama\n", "wrong-type"),
        ("model: llama\nmodel: gpt2\n", "duplicate-key"),
        ("modle: llama\n", "unknown-key"),
        ("model: {nmae: llama}\n", "unknown-key"),
        ("model: llama\ndata: {text: a, text: b}\n", "duplicate-key"),
        ("model: [llama\n", "bad-yaml"),
        ("model: \x00\n", "bad-yaml"),
        ("a: &x 1\nb: *x\n", "no-aliases"),
        ("model: " + "{a: " * 40 + "1" + "}" * 40 + "\n", "too-deep"),
        ("model:\n", "wrong-type"),
        ("{}\n", "missing-key"),
    ],
)
def test_a_file_of_another_form_is_refused(text, slug):
    problems = refusal_of(text)
    assert slug in {problem.slug for problem in problems}, problems
    assert refusal_of(text, "steps=3")


def test_mistakes_of_values_and_of_what_they_name_come_together(tmp_path):
    (tmp_path / "file").write_text("")
    text = f"""\
model: {{name: "tests.launch.some_rows:absent"}}
data: {{function: "tests.launch.some_rows:few", args: {{sizes: 3}}, global_batch: 15}}
mesh: {{dp: 2}}
plan: nosuch
hardware: nosuch
optimizer: {{lr: -1, clip: 0}}
schedule: nope
steps: 0
checkpoints: {{folder: {tmp_path}/file/runs}}
metrics: {{jsonl: {tmp_path}, html: {tmp_path}/file/page.html}}
"""
    found = [(problem.slug, problem.where.removeprefix("run.yaml:").partition(":")[0]) for problem in refusal_of(text)]
    assert found == [
        ("no-such-factory", "1"),
        ("bad-value", "2"),
        ("indivisible-batch", "2"),
        ("no-such-plan", "4"),
        ("unknown-hardware", "5"),
        ("bad-value", "6"),
        ("bad-value", "6"),
        ("wrong-type", "7"),
        ("bad-value", "8"),
        ("not-a-folder", "9"),
        ("not-a-file", "10"),
        ("not-a-folder", "10"),
    ]
