"""Plan files: invalid and hostile YAML is refused with line, column, cause and fix, all mistakes at once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml

from parallelize import PlanError, load_plan, shipped_plans
from parallelize.base.files.paths import read_named
from parallelize.plan.pattern import alternatives, matches
from parallelize.plan.plan_file import parse_plan, plans_folder
from parallelize.plan.styles.notation import TRANSFORMERS_WORDS, parse_style
from parallelize.plan.styles.style import STYLES

GOOD = "schema_version: 1\ntensor_parallel: {a: colwise}\n"


@pytest.mark.parametrize("name", shipped_plans())
def test_shipped_plans_load_and_fit_one_screen(name):
    plan = load_plan(name)
    assert plan.name == name and plan.rules and plan.model_types
    assert len(Path(plan.source).read_text().splitlines()) <= 45


@pytest.mark.parametrize("name", shipped_plans())
def test_the_published_schema_agrees(name):
    import jsonschema

    schema = json.loads((plans_folder() / "schema.json").read_text())
    jsonschema.validate(yaml.safe_load(shipped_plans()[name].read_text()), schema)


def test_the_published_schema_knows_every_style_word():
    pattern = json.loads((plans_folder() / "schema.json").read_text())["$defs"]["style"]["pattern"]
    words = pattern[pattern.index("(") + 1 : pattern.index(")")].split("|")
    assert set(words) == {word for word, style in STYLES.items() if style.in_plans} | set(TRANSFORMERS_WORDS)


MISTAKES = [
    ("tensor_parallel: {a: colwise}", "no-version", ""),
    ("schema_version: 2\ntensor_parallel: {a: colwise}", "unknown-version", ":1:17"),
    ("schema_version: 1", "missing-key", ""),
    ("schema_version: 1\ntensor_parallel: {}", "missing-key", ":2:18"),
    (GOOD + "modle_type: llama", "unknown-key", ":3:1"),
    (GOOD + "model_type: no", "wrong-type", ":3:13"),
    (GOOD + "base: 010", "wrong-type", ":3:7"),
    (GOOD + "base: [x]\nbase: y", "duplicate-key", ":4:1"),
    (GOOD + "defaults: {sequence_parallel: yes}", "wrong-type", ":3:31"),
    (GOOD + "defaults: {sequence_paralel: true}", "unknown-key", ":3:12"),
    (GOOD + "sizes: {heads: 010}", "wrong-type", ":3:16"),
    (GOOD + "sizes: {heads: 1:30}", "wrong-type", ":3:16"),
    (GOOD + "sizes: {heads: {form: x}}", "unknown-key", ":3:17"),
    (GOOD + "sizes: {heads: {from: x, below_tp: split}}", "bad-value", ""),
    (GOOD + "local: {a: {n: heads}}", "unknown-size", ":3:16"),
    (GOOD + "sequence_parallel: {leave: x}", "missing-key", ":3:20"),
    (GOOD + "positions: ' '", "bad-value", ":3:12"),
    (GOOD + "attention: {'': causal}", "bad-pattern", ":3:13"),
    ("schema_version: 1\ntensor_parallel: {a: colwize}", "unknown-style", ":2:22"),
    ("schema_version: 1\ntensor_parallel: {a: 'colwise('}", "bad-style", ":2:22"),
    ("schema_version: 1\ntensor_parallel: {a: colwise(outptu=full)}", "unknown-style-option", ":2:22"),
    ("schema_version: 1\ntensor_parallel: {a: colwise(output=half)}", "bad-style-option", ":2:22"),
    ("schema_version: 1\ntensor_parallel: {a: colwise(chunks=0)}", "bad-style-option", ":2:22"),
    ("schema_version: 1\ntensor_parallel: {a: colwise(heads)}", "unknown-size", ""),
    ("schema_version: 1\ntensor_parallel: {a..b: colwise}", "bad-pattern", ":2:19"),
    ("schema_version: 1\ntensor_parallel: {'a[0]': colwise}", "bad-pattern", ":2:19"),
    ("schema_version: 1\ntensor_parallel: {a: colwise, a: rowwise}", "duplicate-key", ":2:31"),
    ("schema_version: 1\ntensor_parallel: {a.b: colwise, a: {b: rowwise}}", "duplicate-key", ""),
    ("schema_version: 1\ntensor_parallel: {a: [colwise]}", "wrong-type", ":2:22"),
    ("schema_version: 1\ntensor_parallel: {*a: colwise}", "no-aliases", ":2:19"),
    ("schema_version: 1\ntensor_parallel: {a: &x colwise, b: *x}", "no-aliases", ":2:22"),
    ("schema_version: 1\ntensor_parallel: {a: !!python/name:os.system colwise}", "no-tags", ":2:22"),
    ("schema_version: 1\ntensor_parallel: {<<: {a: colwise}}", "no-aliases", ":2:19"),
    ("schema_version: 1\ntensor_parallel: " + "[" * 40, "too-deep", ":2:"),
    ("schema_version: 1\ntensor_parallel: {a: " + "x" * 2000 + "}", "too-large", ":2:22"),
    ("x" * 300_000, "too-large", ""),
    ("", "empty-plan", ""),
    ("- a", "wrong-type", ":1:1"),
    ("a: b: c", "bad-yaml", ":1:5"),
    ("a: \x00", "bad-yaml", ""),
    ("schema_version: 0x" + "f" * 100_000 + "\ntensor_parallel: {a: colwise}", "wrong-type", ""),
]


@pytest.mark.parametrize(("text", "slug", "position"), MISTAKES, ids=[f"{i}-{m[1]}" for i, m in enumerate(MISTAKES)])
def test_mistakes(text, slug, position):
    began = time.thread_time()
    with pytest.raises(PlanError) as error:
        parse_plan(text, "p.yaml")
    assert time.thread_time() - began < 1.0
    problems = [problem for problem in error.value.problems if problem.slug == slug]
    assert problems, str(error.value)[:500]
    assert problems[0].where.startswith("p.yaml" + position)


def test_alias_bombs_cost_nothing():
    bomb = "a: &a [x]\n" + "\n".join(
        f"{b}: &{b} [*{a},*{a},*{a},*{a}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    began = time.thread_time()
    with pytest.raises(PlanError):
        parse_plan(bomb)
    assert time.thread_time() - began < 0.5


def test_all_mistakes_at_once_in_order_with_suggestions():
    with pytest.raises(PlanError) as error:
        parse_plan(
            "schema_version: 1\nmodle_type: x\ntensor_parallel:\n  a: colwize\n  b: rowise\nlocl: {}\n", "p.yaml"
        )
    assert error.value.slugs == ("unknown-key", "unknown-style", "unknown-style", "unknown-key")
    text = str(error.value)
    for fix in ("`model_type`", "`colwise`", "`rowwise`", "`local`"):
        assert fix in text


def test_an_unknown_plan_name_gets_suggestions():
    with pytest.raises(PlanError, match="llama"):
        load_plan("lama")
    with pytest.raises(PlanError) as error:
        load_plan("./nowhere/llama.yaml")
    assert error.value.slugs == ("no-such-plan",)


def test_patterns():
    assert matches("layers.*.{q,k}_proj", "layers.12.k_proj")
    assert not matches("layers.*.{q,k}_proj", "layers.12.x.k_proj")
    assert not matches("layers.*", "layers")
    assert matches("w*", "wq") and matches("w*", "w")
    assert alternatives("{a,b}.{c,d}") == ["a.c", "a.d", "b.c", "b.d"]


@pytest.mark.parametrize("text", ["colwise", "colwise(heads)", "colwise(heads+kv)", "gather(x)", "colwise(chunks=2)"])
def test_style_text_round_trips(text):
    assert str(parse_style(text)) == text and parse_style(str(parse_style(text))) == parse_style(text)


def test_what_would_wait_for_a_writer_is_no_plan(tmp_path):
    """A named pipe, or a device. The pipe of a shell (`<(command)`) has a writer."""
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (str(tmp_path / "pipe.yaml"), "/dev/zero"):
        with pytest.raises(PlanError, match="unsafe-path: is not a regular file"):
            load_plan(path)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as file:
        file.write("layers: 2")
    assert read_named(Path(f"/dev/fd/{reading}"), 1 << 20) == b"layers: 2"
    os.close(reading)
    (tmp_path / "large.yaml").write_text("#" * (1 << 21))
    with pytest.raises(PlanError, match="oversized-file"):
        load_plan(str(tmp_path / "large.yaml"))
