"""Names that torch and `transformers` know are checked before a process starts, with all other mistakes of the file;
nothing is built."""

from __future__ import annotations

import json
import sys

import pytest

from parallelize.base.errors import LaunchError, ParallelizeError
from parallelize.base.mesh import MeshSpec
from parallelize.cli import main
from parallelize.launch.config.run_config_file import parse_run_config
from parallelize.launch.name_checks import IMPORT_CHECKS, NAME_CHECKS, check_names
from parallelize.plan.choose import choose_plan
from parallelize.plan.model_facts import describe
from parallelize.plan.models.model_source import read_model
from parallelize.plan.options import Options
from parallelize.plan.resolve import resolve
from tests.launch.launched import write_run

RUN = """\
model: {name: llama, set: {num_attention_heads: 12, num_key_value_heads: 4, hidden_size: 96}}
data: {function: "tests.launch.some_rows:rows"}
mesh: {tp: 2}
optimizer: {name: AdamW, lr: 1e-3, args: {betas: [0.9, 0.95]}}
"""


def found(text, checks=NAME_CHECKS):
    """(slug, line and column) of each problem."""
    try:
        parse_run_config(text, "run.yaml", (), checks)
    except LaunchError as error:
        return [(problem.slug, problem.where.removeprefix("run.yaml:")) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (("llama", "lama"), [("unknown-model", "1:15")]),
        (("llama", "folder/of/llama"), [("unknown-model", "1:15")]),
        (("hidden_size", "hidden_sizes"), [("unknown-config-field", "1:15")]),
        (
            ("{num_attention_heads: 12, num_key_value_heads: 4, hidden_size: 96}", "{hidden_sise: 3}"),
            [("unknown-config-field", "1:41")],
        ),
        (("hidden_size: 96", "hidden_size: 1e999"), [("wrong-type", "1:90")]),
        (("hidden_size: 96", "hidden_size: -5"), [("bad-config", "1:15")]),
        (("AdamW", "Adamw"), [("no-such-object", "4:19")]),
        (("AdamW", "lr_scheduler"), [("bad-optimizer", "4:19")]),
        (("betas: [0.9, 0.95]", "betas: [2, 3]"), [("bad-optimizer", "4:42")]),
        (("betas", "beta"), [("bad-optimizer", "4:42")]),
        (('rows"', 'rows", tokenizer: absent'), [("no-tokenizer", "2:60")]),
        (("tp: 2", "tp: 5"), [("uneven-heads", "3:7"), ("uneven-heads", "3:7")]),
        (("tp: 2", "tp: 3"), [("uneven-heads", "3:7")]),
        (("tp: 2", "tp: 12"), []),  # key/value heads are replicated
        (("tp: 2", "dp: 5"), [("indivisible-batch", "2:7")]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_names_are_checked_without_building_the_model(change, problems):
    assert found(RUN) == []
    assert found(RUN.replace(*change)) == problems


def test_all_mistakes_come_together():
    text = RUN.replace("llama", "lama").replace("AdamW", "Adamw").replace("tp: 2", "tpp: 2") + "steps: -1\n"
    assert [slug for slug, _ in found(text)] == ["unknown-model", "unknown-axis", "no-such-object", "wrong-type"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe", "bloom", "t5"])
def test_heads_are_refused_where_the_plan_refuses_them(name):
    """`resolve` has the built model, and is the other opinion."""
    model = read_model(name, {"num_hidden_layers": 2} if name not in ("bloom", "t5") else {}).build("meta")
    facts = describe(model)
    for tp in (2, 3, 4, 5, 7):
        refused = {
            slug
            for slug, _ in found(
                f"model: {name}\ndata: {{function: 'tests.launch.some_rows:rows'}}\nmesh: {{tp: {tp}}}"
            )
        }
        try:
            resolve(choose_plan(model)[0], facts, MeshSpec(tp=tp), Options())
            slugs = set()
        except ParallelizeError as error:
            slugs = set(error.slugs)
        assert refused <= slugs, (tp, refused, slugs)
        if name != "t5":  # whose rules for attention are all optional
            assert ("uneven-heads" in refused) == ("uneven-heads" in slugs), tp


def test_a_rank_imports_what_a_launcher_only_looks_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "made_rows.py").write_text("import functools\nglobals()['made'] = lambda size: [size]\n")
    (tmp_path / "broken_rows.py").write_text("def rows(:\n    pass\n")
    text = "model: llama\ndata: {{function: '{}', args: {{{}}}}}\n"
    assert found(text.format("made_rows:made", "size: 1"), (*NAME_CHECKS, *IMPORT_CHECKS)) == []
    assert found(text.format("broken_rows:rows", "size: 1")) == [("no-such-object", "2:18")]
    config = parse_run_config(text.format("made_rows:absent", ""), "run.yaml")
    with pytest.raises(LaunchError, match=r"run.yaml:2:18: no-such-object: made_rows has no 'absent'"):
        check_names(config)
    with pytest.raises(LaunchError, match=r"run.yaml:2:18: bad-value: .*'size'"):
        check_names(parse_run_config(text.format("made_rows:made", "sizes: 1"), "run.yaml"))


def test_the_command_reports_them_before_ranks_and_launch_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"model_type": "lama"}))
    write_run(tmp_path, model={"name": "model"}, optimizer={"name": "Adamw", "lr": -1.0})
    for arguments in ([], ["--dry-run"], ["--emit", "k8s"]):
        assert main(["run", "run.yaml", *arguments]) == 2
        text = capsys.readouterr().err
        for slug in ("unknown-model", "no-such-object", "bad-value"):
            assert f": {slug}: " in text, text
