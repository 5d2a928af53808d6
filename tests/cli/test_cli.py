"""The command line: what each command prints, as text and as JSON, and its exit status."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

from parallelize import ParallelizeError, load_plan, shipped_plans
from parallelize.base.mesh import MeshSpec
from parallelize.cli import main
from parallelize.cli.completion import walk_commands
from parallelize.cli.environment import absent_features, environment
from parallelize.cli.parser import build_parser
from parallelize.cli.transformers_plans import expert_layout, read_source
from parallelize.plan.hf_plans import ForeignPlan, export_plan, import_plan
from parallelize.plan.model_facts import describe
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.resolve import resolve
from parallelize.plan.styles.notation import TRANSFORMERS_WORDS, parse_style, transformers_word

LINEARS = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}


def run(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "parallelize", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def words_file(folder: Path, words: object) -> Path:
    path = folder / "words.json"
    path.write_text(json.dumps(words))
    return path


@pytest.fixture
def damaged(tmp_path):
    """A checkpoint of one linear layer with one bit flipped, and the same undamaged."""
    import torch

    from parallelize import Checkpointer

    with Checkpointer(tmp_path / "fine", torch.nn.Linear(8, 8)) as checkpoints:
        checkpoints.save(0)
    shutil.copytree(tmp_path / "fine", tmp_path / "damaged")
    file = next((tmp_path / "damaged").rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return tmp_path


# -- exit statuses -----------------------------------------------------------------------------------------------------


def test_mistakes_end_with_2_and_the_environment_with_3(tmp_path, capsys, monkeypatch):
    (tmp_path / "there.yaml").write_text("")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for status, slug, arguments in [
        (2, "usage", []),
        (2, "usage", ["plns"]),
        (2, "usage", ["schedule", "1f1b", "--ranks", "two", "--microbatches", "2"]),
        (2, "usage", ["plans", "list", "--js"]),
        (2, "no-such-plan", ["plans", "lama"]),
        (2, "file-exists", ["plans", "copy", "llama", str(tmp_path / "there.yaml")]),
        (2, "unknown-schedule", ["schedule", "1f2b", "--ranks", "2", "--microbatches", "2"]),
        (3, "missing-package", ["plans", "import", "qwen3"]),
        (3, "file-error", ["plans", "copy", "llama", str(tmp_path / "nowhere" / "x.yaml")]),
        (3, "file-error", ["plans", "import", str(tmp_path / "nothing.json")]),
    ]:
        assert main(arguments) == status, arguments
        printed = capsys.readouterr()
        assert slug in printed.err and not printed.out and "Traceback" not in printed.err
        assert main([*arguments, "--json"]) == status, arguments
        printed = capsys.readouterr()
        (error,) = json.loads(printed.out)["error"]
        assert list(error) == ["slug", "where", "what", "rows", "fix"] and not printed.err
        assert error["slug"] == slug


def test_a_mistyped_command_gets_a_suggestion(capsys):
    assert main(["checkpoint", "verfy"]) == 2
    assert "did you mean `verify`?" in capsys.readouterr().err


def test_a_bug_of_this_package_is_raised(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("parallelize.cli.plans.load_plan", broken)
    with pytest.raises(ZeroDivisionError):
        main(["plans", "llama"])
    monkeypatch.setattr("parallelize.cli.plans.load_plan", lambda *_: __import__("parallelize.not_there"))
    with pytest.raises(ImportError):
        main(["plans", "llama"])


class RefusesTransformers(MetaPathFinder):
    """An import hook that blocks a package, as some test and deployment tools install it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == "transformers":
            raise ImportError("transformers is blocked")


def forget_transformers(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)


def test_a_blocked_package_ends_with_3(monkeypatch, capsys):
    forget_transformers(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [RefusesTransformers(), *sys.meta_path])
    assert main(["plans", "import", "qwen3", "--json"]) == 3
    (error,) = json.loads(capsys.readouterr().out)["error"]
    assert error["slug"] == "missing-package" and "transformers is blocked" in error["what"] and error["fix"]


@pytest.mark.parametrize("message", ["libcudart.so.12: cannot open shared object file", ""])
def test_a_broken_package_ends_with_3(message, tmp_path, monkeypatch, capsys):
    (tmp_path / "transformers.py").write_text(f"raise ImportError({message!r})")
    forget_transformers(monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["plans", "import", "qwen3"]) == 3
    printed = capsys.readouterr().err
    assert "missing-package: a package cannot be imported: " + (message or "ImportError") in printed


@pytest.mark.processes
def test_a_closed_stdout_and_ctrl_c_print_no_traceback(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "parallelize", "plans", "--json"]
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert process.returncode == 0 and not process.stderr
    monkeypatch.setattr("parallelize.cli.plans.load_plan", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["plans", "llama"]) == 130


@pytest.mark.processes
def test_the_module_runs_too():
    process = run("plans", "llama")
    assert process.returncode == 0 and process.stdout == shipped_plans()["llama"].read_text() and not process.stderr
    assert run("plans", "lama").returncode == 2
    assert "exit status:" in run("--help").stdout


def test_every_command_that_prints_results_takes_json():
    without = {
        path for path, command in walk_commands(build_parser()) if "--json" not in command._option_string_actions
    }
    assert without == {"", " plans", " checkpoint", " completion", " run"}  # a run prints what it does while it does it


# -- checkpoint --------------------------------------------------------------------------------------------------------


def test_verify_ends_with_1_if_it_finds_damage(damaged, capsys):
    assert main(["checkpoint", "verify", str(damaged / "fine")]) == 0
    assert "match their hashes" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(damaged / "damaged")]) == 1
    assert "corrupt-tensor" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(damaged / "damaged"), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["slug"] == "corrupt-tensor"
    assert main(["checkpoint", "verify", str(damaged / "fine"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []
    assert main(["checkpoint", "verify", str(damaged / "none"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"][0]["slug"] == "no-checkpoint"


def test_commands_that_write_say_so_in_json(damaged, capsys):
    target = damaged / "new"
    assert main(["checkpoint", "reshape", str(damaged / "fine"), str(target), "--mesh", "dp=2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["mesh"] == [["dp", 2]] and data["tensors"] >= 2 and data["folder"].startswith(str(target))
    assert all((Path(data["folder"]) / name).stat().st_size == size for name, size in data["files"].items())


# -- plans -------------------------------------------------------------------------------------------------------------


def test_plans_are_listed_and_shown(capsys):
    def output_of(*arguments):
        assert main(["plans", *arguments]) == 0
        return capsys.readouterr().out

    listed = output_of()
    assert listed == output_of("list") and all(name in listed for name in shipped_plans())
    row = next(line.split() for line in listed.splitlines() if line.startswith("gemma3 "))
    assert row[1] == "gemma3_text" and row[2] == str(len(load_plan("gemma3").rules))
    assert "sequence_parallel, loss_parallel, fuse_loss, overlap" in listed
    assert output_of("llama") == output_of("show", "llama") == shipped_plans()["llama"].read_text()
    data = json.loads(output_of("--json"))
    assert data == json.loads(output_of("list", "--json")) == json.loads(output_of("--json", "list"))
    assert {plan["name"] for plan in data} == set(shipped_plans())
    shown = json.loads(output_of("llama", "--json"))
    assert shown == json.loads(output_of("--json", "llama")) == json.loads(output_of("--json", "show", "llama"))
    assert shown["rules"]["model.layers.*.self_attn.q_proj"] == "colwise(heads)" and shown["serves"]


def test_only_options_that_a_plan_serves_are_listed(tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text("schema_version: 1\ntensor_parallel: {a: replicate}\n")
    assert main(["plans", "show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["serves"] == []


def test_a_copy_is_the_plan_with_a_line_for_editors(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plans", "copy", "llama"]) == 0
    first, _, rest = (tmp_path / "llama.yaml").read_text().partition("\n")
    assert rest == shipped_plans()["llama"].read_text()
    schema = first.removeprefix("# yaml-language-server: $schema=file://")
    assert json.loads(Path(schema).read_text())["title"] == "A parallelize plan"
    assert load_plan("./llama.yaml").digest() == load_plan("llama").digest()
    (tmp_path / "llama.yaml").write_text("mine")
    assert main(["plans", "copy", "llama"]) == 2 and (tmp_path / "llama.yaml").read_text() == "mine"
    assert main(["plans", "copy", "llama", "--force"]) == 0 and (tmp_path / "llama.yaml").read_text() != "mine"
    (tmp_path / "folder").mkdir()
    capsys.readouterr()
    assert main(["plans", "copy", "qwen3", "folder", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == "folder/qwen3.yaml"
    assert main(["plans", "copy", "folder/qwen3.yaml", "again.yaml"]) == 0
    assert (tmp_path / "again.yaml").read_text() == (tmp_path / "folder" / "qwen3.yaml").read_text()


# -- plans to and from transformers ------------------------------------------------------------------------------------

# transformers 5.23 has plans for these, which differ in attention and norms
TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "gpt_neox",
    "starcoder2",
    "glm",
    "qwen3_moe",
)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("model_type", TYPES)
def test_what_is_imported_is_exported_as_it_was(model_type):
    from transformers import CONFIG_MAPPING

    words = CONFIG_MAPPING[model_type].base_model_tp_plan
    plan = parse_plan(import_plan(read_source(model_type)).text)
    assert plan.model_types == (model_type,)
    exported = export_plan(plan)
    assert exported.words == words and not exported.refused


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", ["aria_text", "granitemoe", "nemotron_h", "inkling2_text"])
def test_weights_of_experts_get_the_words_of_their_layout(model_type):
    """Without a gate; transposed; as most; one whose own word would split the gate from the up projection."""
    from transformers import CONFIG_MAPPING

    words = dict(CONFIG_MAPPING[model_type].base_model_tp_plan)
    if model_type == "inkling2_text":
        words["layers.*.mlp.experts.gate_up_proj"] = "packed_colwise"
    plan = parse_plan(import_plan(read_source(model_type)).text)
    assert export_plan(plan, [expert_layout(model_type)]).words == words


@pytest.mark.parametrize(
    ("layouts", "why"),
    [
        ([], "without a model type"),
        ([{"has_gate": True}, {"has_gate": False}], "differently"),
        ([{}], "in modules inside"),
        ([{"has_bias": True}], "biases"),
        ([{"has_post_expert_norm": True}], "norm"),
    ],
)
def test_experts_without_words_are_refused(layouts, why):
    plan = parse_plan("schema_version: 1\ntensor_parallel: {experts: experts}")
    (problem,) = export_plan(plan, layouts).refused
    assert problem.slug == "no-equal-word" and why in problem.what


@pytest.mark.sweep
def test_the_command_asks_the_model_types_of_a_plan(capsys):
    assert main(["plans", "export", "gpt_oss"]) == 2
    assert "no word is for biases of experts" in capsys.readouterr().err
    assert main(["plans", "export", "granitemoe"]) == 0
    assert "packed_colwise" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "olmo2"])
def test_an_imported_plan_serves_its_model_as_it_stands(model_type):
    from tests.support.models import tiny_model

    model = tiny_model(model_type)
    plan = parse_plan(import_plan(read_source(model.config.model_type)).text)
    imported = resolve(plan, describe(model), MeshSpec(tp=2)).parameters
    shipped = resolve(load_plan(model_type), describe(model), MeshSpec(tp=2)).parameters
    if model_type not in ("phi3", "olmo2"):  # which transformers gathers to full size
        assert {name: row.layout for name, row in imported.items()} == {
            name: row.layout for name, row in shipped.items()
        }
    assert imported.keys() == shipped.keys()
    if model_type == "qwen3":  # fewer key/value heads than ranks are replicated
        assert (
            resolve(plan, describe(model), MeshSpec(tp=8)).attributes
            == resolve(load_plan("qwen3"), describe(model), MeshSpec(tp=8)).attributes
        )


def test_attributes_that_count_heads_become_local():
    plan = parse_plan(import_plan(read_source("seed_oss")).text)
    sizes = {item.attribute: item.size for item in plan.local}
    assert sizes["num_attention_heads"] == "heads" and sizes["num_key_value_heads"] == "kv_heads"


def test_what_is_undecided_is_left_to_the_user():
    imported = import_plan(read_source("apertus"))
    assert any("UNDECIDED model.layers.*.mlp.act_fn" in note for note in imported.notes)
    assert "act_fn:" not in imported.text.partition("tensor_parallel:")[2]


def test_a_rule_that_matches_nothing_in_the_model_is_optional():
    """transformers only warns of it."""
    plan = parse_plan(import_plan(read_source("doge")).text)
    optional = {rule.pattern.rpartition(".")[2]: rule.optional for rule in plan.rules}
    assert optional["router_gate"] and not optional["gate_proj"]


def test_a_model_that_cannot_be_built_still_has_words():
    imported = import_plan(read_source("nemotron"))
    assert any("could not be built" in note for note in imported.notes)
    assert "model.norm?: replicate" in imported.text


@pytest.mark.processes
def test_words_in_a_file_need_no_transformers_and_no_torch(tmp_path):
    words = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {"layers.*.self_attn.o_proj": "rowwise"}
    words |= {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise_split_input"}
    config = {"model_type": "mine", "num_attention_heads": 8, "num_key_value_heads": 2, "base_model_tp_plan": words}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import sys; sys.modules['transformers'] = None; from parallelize.cli import main\n"
        "status = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "plans", "import", str(tmp_path), "-o", str(tmp_path / "mine.yaml")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert "sequence parallelism" in process.stderr and "no model was built" in process.stderr
    text = (tmp_path / "mine.yaml").read_text()
    assert "# packed_colwise" in text and "# - sequence parallelism" in text
    plan = load_plan(str(tmp_path / "mine.yaml"))
    rules = {rule.pattern: str(rule.style) for rule in plan.rules}
    assert plan.model_types == ("mine",) and plan.sizes["kv_heads"].source == "num_key_value_heads"
    assert rules["model.layers.*.self_attn.k_proj"] == "colwise(kv_heads)"
    assert rules["model.layers.*.self_attn.o_proj"] == "rowwise(heads)"
    assert rules["model.layers.*.mlp.gate_up_proj"] == "colwise(chunks=2)"
    assert export_plan(plan).words == words
    assert main(command[3:]) == 2  # the file exists
    assert main([*command[3:], "--force"]) == 0


def test_names_in_full_and_another_base(tmp_path):
    full = words_file(tmp_path, {"model.layers.*.up": "colwise", "lm_head": "colwise_rep"})
    rules = {rule.pattern: str(rule.style) for rule in parse_plan(import_plan(read_source(str(full))).text).rules}
    assert rules["model.layers.*.up"] == "colwise" and rules["lm_head"] == "colwise(output=vocabulary)"
    plan = parse_plan(import_plan(read_source(str(words_file(tmp_path, LINEARS)), "gpt", "x")).text)
    assert plan.base == "gpt" and plan.rules[1].pattern == "gpt.layers.*.mlp.up_proj" and plan.model_types == ("x",)


def test_unknown_words_are_named_all_at_once(tmp_path, capsys):
    path = words_file(tmp_path, {**LINEARS, "layers.*.experts": "moe_identity_expert", "layers.*.a": "mla_kv_a_proj"})
    assert main(["plans", "import", str(path), "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["error"]
    assert error["slug"] == "untranslatable-plan"
    assert [word for _, word in error["rows"]] == ["moe_identity_expert", "mla_kv_a_proj"]


def test_hostile_names_stay_text(tmp_path, capsys):
    for name, slug in [("a: b\nlocal", "bad-pattern"), ("a # b", "bad-pattern"), ("'", "bad-pattern")]:
        assert main(["plans", "import", str(words_file(tmp_path, {name: "colwise"}))]) == 2
        assert slug in capsys.readouterr().err
    for name in ("null", "0", "*", "{a,b}", "on"):
        plan = parse_plan(import_plan(ForeignPlan({name: "colwise"}, "x\n- y", "on", base="")).text)
        assert name in [rule.pattern for rule in plan.rules] and plan.model_types == ("on",)


def test_sources_without_a_plan(tmp_path, capsys):
    for text in ("[1]", "{", "{}", '{"a": {"b": 1}}', '{"base_model_tp_plan": {}}', '{"base_model_tp_plan": ["a"]}'):
        (tmp_path / "config.json").write_text(text)
        assert main(["plans", "import", str(tmp_path)]) == 2, text
        assert "bad-plan-source" in capsys.readouterr().err
    assert main(["plans", "import", "gpt2"]) == 2 and "no-foreign-plan" in capsys.readouterr().err
    assert main(["plans", "import", "qwen33"]) == 2 and "qwen3" in capsys.readouterr().err


def test_a_config_file_names_its_model(tmp_path, capsys):
    from transformers import Qwen3Config

    Qwen3Config(num_hidden_layers=1, hidden_size=64, vocab_size=50).save_pretrained(tmp_path)
    assert main(["plans", "import", str(tmp_path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "model.layers.*.input_layernorm: replicate " in data["plan"]
    assert any("the shipped plan qwen3" in note for note in data["notes"])


def test_exports_are_what_transformers_says_itself(capsys):
    from transformers import LlamaConfig

    assert main(["plans", "export", "llama"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == LlamaConfig.base_model_tp_plan
    assert "has no sequence parallelism" in printed.err and "num_attention_heads" in printed.err


def test_rules_without_an_equivalent_are_refused_or_dropped_with_a_warning(capsys):
    assert main(["plans", "export", "phi3"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and "qkv_proj: colwise(heads + kv_heads + kv_heads)" in printed.err
    assert "self_attn.num_key_value_heads" in printed.err and "--lossy" in printed.err
    assert main(["plans", "export", "phi3", "--lossy"]) == 0
    printed = capsys.readouterr()
    assert "qkv_proj" not in printed.out and "dropped: " in printed.err and "qkv_proj" in printed.err
    assert json.loads(printed.out)["layers.*.mlp.gate_up_proj"] == "packed_colwise"


@pytest.mark.parametrize(
    ("rule", "refused"),
    [
        ("model.a: rms_norm", True),
        ("model.a: shard", True),
        ("model.a: colwise(output=vocabulary)", True),
        ("model.a*: colwise", True),
        ("head: colwise", True),
        ("model.a: colwise(overlap=auto)", False),
        ("model.a: replicate", False),
        ("head: replicate", False),
        ("model.a: gather", False),
    ],
)
def test_rules_without_an_equivalent(rule, refused):
    plan = parse_plan(f"schema_version: 1\nbase: model\ntensor_parallel:\n  {rule}\n")
    assert bool(export_plan(plan).refused) == refused


def test_defaults_and_embeddings_that_mean_something_else_there():
    text = "schema_version: 1\nbase: model\ntensor_parallel:\n  model.embed_tokens: {}\n  model.wte: embedding\n"
    assert export_plan(parse_plan(text.format("embedding"))).words == {"wte": "embedding_rowwise"}
    # unnamed it would be split
    assert export_plan(parse_plan(text.format("replicate"))).words["embed_tokens"] == "replicate"
    on = text.format("embedding") + "defaults: {sequence_parallel: true}\nsequence_parallel: {layers: model.layers}\n"
    assert export_plan(parse_plan(on)).refused


def test_one_table_of_words_serves_both_directions():
    for word in (*TRANSFORMERS_WORDS, "colwise", "rowwise", "replicate", "embedding_colwise"):
        back = transformers_word(parse_style(word))
        assert back is not None and str(parse_style(back)) == str(parse_style(word))
        # old spellings; the same style, by the option `ep`
        others = (
            "colwise_rep",
            "rowwise_rep",
            "ep_dispatch_experts",
        )
        assert back == word or word in others
    assert transformers_word(parse_style("rms_norm")) is None


# -- schedule, env -----------------------------------------------------------------------------------------------------


def test_a_schedule_as_json(capsys):
    assert main(["schedule", "1f1b", "--ranks", "2", "--microbatches", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["orders"] == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    assert data["bubble_fraction"] == pytest.approx(1 / 3) and data["in_flight"] == [2, 1]


def test_the_names_of_schedules_are_complete():
    from parallelize.cli.schedule import NAMES
    from parallelize.plan.stage_ranks import SCHEDULES

    assert set(NAMES) == set(SCHEDULES)


@pytest.mark.processes
def test_env_prints_versions_and_no_secrets(capsys, monkeypatch):
    import torch

    for name, value in [("NCCL_DEBUG", "INFO"), ("TORCH_API_KEY", "s3cret"), ("MASTER_ADDR", "10.0.0.1")]:
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_MIRROR", "https://me:s3cret@host/x")
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    assert main(["env", "--json"]) == 0
    output = capsys.readouterr().out
    data = json.loads(output)
    assert "s3cret" not in output and data["variables"]["TORCH_MIRROR"] == "https://...@host/x"
    assert data["variables"]["NCCL_DEBUG"] == "INFO" and data["variables"]["MASTER_ADDR"] == "10.0.0.1"
    assert data["torch"]["version"] == torch.__version__ and "gloo" in data["torch"]["backends"]
    assert data["packages"]["pyyaml"] and data["system"]["memory_bytes"] > 2**28
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and "NCCL_DEBUG" in text and "s3cret" not in text


@pytest.mark.processes
def test_env_lists_the_gpus_of_the_driver(tmp_path, monkeypatch, capsys):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "NVIDIA H200, 143771 MiB, 570.1"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["gpus"] == [{"name": "NVIDIA H200", "memory": "143771 MiB", "driver": "570.1"}]
    assert main(["env"]) == 0 and "NVIDIA H200, 143771 MiB, driver 570.1" in capsys.readouterr().out
    tool.write_text("#!/bin/sh\nexit 9\n")  # a driver that does not answer
    assert environment()["gpus"] == []


def test_env_works_without_torch(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch" in environment()["torch"]["error"]
    assert main(["env"]) == 0 and "torch is absent" in capsys.readouterr().out


def test_env_names_the_features_whose_private_names_are_gone(monkeypatch):
    import torch.distributed.device_mesh as device_mesh

    assert list(absent_features()) == []
    monkeypatch.delattr(device_mesh, "_mesh_resources")
    ((feature, name),) = absent_features()
    assert feature.startswith("current_mesh: The mesh of a surrounding") and name.endswith("_mesh_resources")
    monkeypatch.undo()
    import torch

    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    assert [feature.partition(":")[0] for feature, _ in absent_features()] == ["backward_id"]


# -- completion --------------------------------------------------------------------------------------------------------

LINES = [
    ("pl", {"plans"}, set()),
    ("plans ", {"show", "import", "export"}, {"--json"}),
    ("plans show l", {"llama"}, {"mistral", "--json"}),
    ("plans show --", {"--json", "--help"}, {"llama"}),
    ("lint l", {"llama", "local.yaml"}, {"plans"}),
    ("checkpoint ", {"inspect", "verify", "reshape", "to-hf", "from-hf"}, {"plans"}),
    ("checkpoint reshape a b --z", {"--zero"}, {"--mesh"}),
    ("checkpoint reshape a b --zero ", {"0", "1", "2", "3"}, {"local.yaml"}),
    ("checkpoint reshape a b --mesh ", set(), {"local.yaml", "0"}),
    ("plans export llama --format ", {"json"}, {"llama"}),
    ("schedule zb", {"zbv"}, {"1f1b"}),
    ("schedule zbv --svg l", {"local.yaml"}, {"llama", "zbv"}),
    ("completion ", {"bash", "zsh", "fish"}, {"local.yaml"}),
]

ASK = {
    "bash": (
        'source "$1"; COMP_WORDS=("${@:2}"); COMP_CWORD=$(($# - 2)); _shtab_parallelize; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    ),
    "fish": 'source $argv[1]; complete -C (string join " " -- $argv[2..]) | string split -f1 \\t',
}


@pytest.mark.processes
@pytest.mark.parametrize("shell", ASK)
def test_shells_complete(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    script = tmp_path / "script"
    script.write_text(run("completion", shell).stdout)
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "local.yaml").write_text("")
    for line, expected, excluded in LINES:
        words = ["parallelize", *line.split(" ")]
        name = ["ask"] if shell != "fish" else []
        command = [shell, "-c", ASK[shell], *name, str(script), *words]
        environment = {**os.environ, "HOME": str(tmp_path)}
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=30, cwd=tmp_path / "cwd", env=environment
        )
        offered = set(process.stdout.split())
        assert expected <= offered and not excluded & offered, (shell, line, offered, process.stderr)
        assert not process.stderr, (line, process.stderr)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_every_shipped_plan_is_completed(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    words = {word for path, _ in walk_commands(build_parser()) for word in path.split()}
    assert all(word in script for word in words | set(shipped_plans()))


def test_errors_are_parallelize_errors_when_parsed():
    with pytest.raises(ParallelizeError) as error:
        build_parser().parse_args(["schedule", "zbv"])
    assert error.value.slugs == ("usage",) and "--ranks" in str(error.value)
