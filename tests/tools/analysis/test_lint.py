"""`lint` with a model and a mesh: each kind of mistake with its slug and place, and no errors for correct plans."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parallelize import lint, load_plan
from parallelize.cli import main
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.plan_file import parse_plan
from tests.axes.tensor.odd_models import OddModel, plan_text
from tests.support.models import COMMON, FAMILIES, tiny_model
from tests.support.refused import refused_command


def tiny(family: str, **more):
    return ModelSource(family, lambda _: tiny_model(family, **more))


def slugs(findings, severity="error"):
    return [finding.problem.slug for finding in findings if finding.severity == severity]


def problem_of(findings, slug):
    return next(finding.problem for finding in findings if finding.problem.slug == slug)


def changed(tmp_path, family, old, new):
    """A copy of a shipped plan's file in which `old` is replaced by `new`."""
    text = Path(load_plan(family).source).read_text(encoding="utf-8")
    assert old in text, old
    path = tmp_path / "plan.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


@pytest.mark.variants(every=29)
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_correct_plans_give_no_errors(family, tp):
    findings = lint(tiny(family), None, f"tp={tp}")
    assert not slugs(findings), [str(finding.problem) for finding in findings]
    assert set(slugs(findings, "warning")) <= {"uneven-shards"}


def test_inputs_that_are_made_before_are_correct():
    ids = torch.zeros(2, 11, dtype=torch.long)
    source = ModelSource(
        "llama", lambda _: tiny_model("llama"), extras={"inputs": lambda batch, length: {"input_ids": ids}}
    )
    assert slugs(lint(source, "llama", "tp=2")) == []


@pytest.mark.sweep
def test_parameters_of_modules_that_get_the_full_sequence_are_reduced_already():
    """Of the mixers of Jamba, which run on all tokens inside of the sequence-parallel region."""
    assert not slugs(lint(tiny("jamba"), None, "tp=2"))


@pytest.mark.sweep
def test_experts_that_are_padded_are_a_warning():
    def is_padded(mesh, **options):
        findings = lint(tiny("mixtral", intermediate_size=40), None, mesh, sequence_parallel=False, **options)
        return "padded-experts" in slugs(findings, "warning")

    assert is_padded("tp=4") and is_padded("tp=2", dtype="bfloat16")
    assert not is_padded("tp=2")


@pytest.mark.sweep
def test_modules_whose_work_cp_does_not_divide_are_a_warning():
    """`lint` names them, and `explain` says it with its assumptions."""
    (warning,) = [x.problem for x in lint(tiny("lfm2_moe"), None, "cp=2") if x.problem.slug == "gathered-over-cp"]
    assert "model.layers.*.conv (2 modules)" in warning.what
    assert "gathered-over-cp" not in slugs(lint(tiny("lfm2_moe"), None, "tp=2"), "warning")


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3"])
def test_one_key_value_head_is_correct(family):
    assert not slugs(lint(tiny(family, num_key_value_heads=1), None, "tp=4"))


@pytest.mark.variants(every=3)
@pytest.mark.parametrize(
    ("old", "new", "slug", "named"),
    [
        ("mlp.down_proj: rowwise", "mlp.down_prj: rowwise", "unmatched-rule", "down_prj"),
        ("    mlp: gather\n", "    mlp: gather\n    mlp.up_proj: replicate\n", "overlapping-rules", "up_proj"),
        ("    input_layernorm: sequence\n", "", "unclaimed-parameter", "input_layernorm"),
        ("mlp.{gate,up}_proj: colwise", "mlp.{gate,up}_proj: replicate", "layouts-do-not-meet", "gate_proj"),
        ("self_attn.o_proj: rowwise(heads)", "self_attn.o_proj: replicate", "layouts-do-not-meet", "o_proj"),
        ("    self_attn: gather(hidden_states)", "    self_attn: replicate", "layouts-do-not-meet", "self_attn"),
        ("lm_head?: colwise(output=vocabulary)", "lm_head?: colwise", "output-is-a-shard", "lm_head"),
    ],
)
def test_a_mistake_is_reported_with_its_place(tmp_path, old, new, slug, named):
    path = changed(tmp_path, "llama", old, new)
    findings = lint(tiny("llama"), path, "tp=2")
    assert slug in slugs(findings), [str(finding.problem) for finding in findings]
    problem = problem_of(findings, slug)
    assert named in str(problem) and problem.fix and "plan.yaml" in problem.where
    assert not dist.is_initialized()


def test_a_norm_on_heads_whose_gradient_is_not_summed(tmp_path):
    path = changed(tmp_path, "qwen3", "gradient=partial", "gradient=full")
    problem = problem_of(lint(tiny("qwen3"), path, "tp=2"), "gradient-not-reduced")
    assert "q_norm" in problem.what or "k_norm" in problem.what


def test_a_head_count_that_is_not_local_fails_in_one_attention_implementation(tmp_path):
    """The fused kernel reads shapes, and eager attention reads the attribute, so both are run."""
    text = Path(load_plan("llama").source).read_text(encoding="utf-8")
    path = tmp_path / "plan.yaml"
    path.write_text(text[: text.index("\nlocal:")] + "\n")
    source = tiny("llama", num_key_value_heads=2)
    findings = lint(source, path, "tp=4")
    assert slugs(findings), "eager attention repeats each head num_key_value_groups times"
    assert "eager" in str(findings[0].problem) or "num_key_value" in str(findings[0].problem)


def test_ties_at_risk(tmp_path):
    path = changed(tmp_path, "gpt2", "lm_head?: colwise(output=vocabulary)", "lm_head?: replicate")
    assert "broken-tie" in slugs(lint(tiny("gpt2", tie_word_embeddings=True), path, "tp=2"))
    path.write_text(path.read_text().replace("  lm_head?: replicate", "  nothing?: replicate"))
    problem = problem_of(lint(tiny("gpt2", tie_word_embeddings=True), path, "tp=2"), "unplanned-tie")
    assert "lm_head" in problem.what


def test_sizes_and_stages():
    assert slugs(lint(tiny("llama"), None, "tp=3")) == ["uneven-heads"] * len(slugs(lint(tiny("llama"), None, "tp=3")))
    assert slugs(lint(tiny("llama"), None, "pp=4,tp=2")) == ["more-stages-than-layers"]
    assert "wrong-world-size" in slugs(lint(tiny("llama"), None, "tp=2", world_size=4))
    assert "unknown-axis" in slugs(lint(tiny("llama"), None, "tp=2,ep=2"))


class Viewing(nn.Module):
    """Attention that views the sequence as -1: with local heads the call succeeds, and the sequence is longer."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.n, self.width = heads, width
        self.qkv, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        split = self.qkv(x).view(x.shape[0], -1, self.n, self.width // self.n)
        joined = split.transpose(1, 2).softmax(-1).transpose(1, 2)
        return self.out(joined.flatten(2))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.blocks = nn.ModuleList(Viewing() for _ in range(2))
        self.head = nn.Linear(32, 61)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


READER = """
    schema_version: 1
    tensor_parallel:
      embed: embedding
      blocks.*: gather
      blocks.*.qkv: colwise
      blocks.*.out: rowwise
      head: colwise(output=full)
"""


def test_a_view_that_takes_local_heads_for_a_longer_sequence(tmp_path):
    path = tmp_path / "reader.yaml"
    path.write_text(textwrap.dedent(READER))
    findings = lint(Reader, path, "tp=2")
    assert slugs(findings), "a wrong sequence length reached the residual"
    assert "blocks.*" in str(findings[0].problem)
    correct = READER.replace("tensor_parallel:", "sizes: {heads: 4}\n    tensor_parallel:")
    correct = correct.replace("colwise\n", "colwise(heads)\n").replace("rowwise", "rowwise(heads)")
    path.write_text(textwrap.dedent(correct) + "local: {blocks.*: {n: heads, width: heads}}\n")
    assert not slugs(lint(Reader, path, "tp=2"))


@pytest.mark.parametrize(
    ("arguments", "slug"),
    [
        ("--mesh tp=4 --ep 3", "bad-ep"),
        ("--mesh zz=2", "unknown-axis"),
        ("--mesh pp=2 --zero 1", "no-data-axis"),
        ("--mesh two", "bad-mesh"),
    ],
)
def test_options_on_a_mesh_are_checked_without_a_model_too(arguments, slug, capsys):
    assert main(["lint", "mixtral", *arguments.split()]) == 2
    assert f"{slug}: " in capsys.readouterr().err
    assert main(["lint", "mixtral", "--mesh", "dp=2,tp=2", "--ep", "4"]) == 0


def test_the_command(tmp_path, capsys):
    assert main(["lint", "llama", "gpt2"]) == 0
    assert "no mistakes" in capsys.readouterr().out
    path = changed(tmp_path, "llama", "mlp.down_proj: rowwise", "mlp.down_prj: rowwise")
    sizes = [
        f"--set={key}={value}" for key, value in {**COMMON, **FAMILIES["llama"][2]}.items() if key != "attention_bias"
    ]
    assert main(["lint", str(path), "--model", "llama", "--mesh", "tp=2", *sizes]) == 2
    assert "unmatched-rule" in capsys.readouterr().err
    assert main(["lint", str(path), "--model", "llama", "--mesh", "tp=2", "--json", *sizes]) == 2
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert findings[0]["severity"] == "error" and findings[0]["where"].startswith(str(path))
    assert main(["lint", "--model", "llama", "--mesh", "tp=4", *sizes]) == 0
    assert main(["lint"]) == 2
    assert main(["lint", "--model", "lama"]) == 2
    assert "did you mean" in capsys.readouterr().err


class ReadsValues(nn.Sequential):
    """Its forward needs values, which tensors on meta do not have."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids.cpu())


def reads_values() -> nn.Module:
    return ReadsValues(nn.Embedding(30, 8), nn.Linear(8, 16), nn.Linear(16, 8))


def test_a_forward_that_cannot_run_is_not_checked(capsys, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("schema_version: 1\ntensor_parallel: {'0': embedding, '1': colwise, '2': rowwise}\n")
    assert main(["lint", str(path), "--model", "tests.tools.analysis.test_lint:reads_values"]) == 1
    streams = capsys.readouterr()
    assert "not checked" in streams.err + streams.out and "no mistakes" not in streams.out


@pytest.mark.parametrize(
    ("slug", "options"),
    [
        ("mixed-sequence", {"tokens": lambda m, x: x.roll(1, 1)}),
        ("mixed-features", {"between": lambda m, h: h / h.abs().amax(dim=(-1,), keepdim=True)}),
        ("divided-features", {"between": lambda m, h: torch.cat(h.view(2, 24, 2, -1).unbind(2), -1)}),
    ],
)
def test_operations_that_the_first_forward_refuses(slug, options):
    findings = lint(lambda: OddModel(**options), parse_plan(plan_text()), "tp=2")
    assert slugs(findings) == [slug]
    assert "test_lint.py:" in str(problem_of(findings, slug))
    if slug != "mixed-sequence":
        styles = {"layers.*.inner.up": ColwiseParallel(), "layers.*.inner.down": RowwiseParallel()}
        assert slugs(lint(lambda: OddModel(**options), styles, "tp=2")) == [slug]


class LossInside(OddModel):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(super().forward(input_ids).flatten(0, 1), input_ids.flatten())


@pytest.mark.parametrize("fuse_loss", [False, True])
def test_a_loss_inside_the_forward(fuse_loss):
    plan = parse_plan(plan_text().replace("output=full", "output=vocabulary"))
    assert not slugs(lint(LossInside, plan, "tp=2", loss_parallel=True, fuse_loss=fuse_loss))


def test_global_state_is_restored():
    before = torch.get_default_dtype(), torch.initial_seed(), torch.random.get_rng_state()
    lint(tiny("llama"), None, "tp=2")
    lint(tiny("llama"), {"model.layers.*.mlp.up_proj": "colwise"}, "tp=2")
    after = torch.get_default_dtype(), torch.initial_seed(), torch.random.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2]) and not dist.is_initialized()


class AutocastInside(nn.Module):
    """Computes its loss inside of its forward, where it asks for autocast by the device of its logits."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        logits = hidden + self.down(self.up(hidden).relu())
        with torch.autocast(device_type=logits.device.type, enabled=False):
            return F.cross_entropy(logits.flatten(0, 1), input_ids.flatten() % 8)


def test_autocast_by_the_device_of_a_tensor():
    plan = {"embed": "replicate", "up": "colwise", "down": "rowwise"}
    assert lint(AutocastInside(), plan, "tp=2") == []
    assert slugs(lint(AutocastInside(), plan | {"down": "replicate"}, "tp=2"))


def test_a_forward_that_cannot_be_followed_is_a_warning(monkeypatch):
    def fail(model, inputs, resolved):
        raise KeyError("no rule")

    monkeypatch.setattr("parallelize.tools.analysis.findings.trace_plan", fail)
    warnings = [
        finding for finding in lint(tiny("llama"), None, "tp=2") if "cannot be followed" in finding.problem.what
    ]
    assert [(finding.severity, finding.problem.slug) for finding in warnings] == [("warning", "cannot-run-forward")]


def test_trace_says_how_much_of_the_plan_was_followed(capsys):
    sizes = (
        "vocab_size=66 hidden_size=48 num_hidden_layers=2 num_attention_heads=8 num_key_value_heads=4 "
        "intermediate_size=72"
    )
    options = [word for size in sizes.split() for word in ("--set", size)]
    assert main(["lint", "--model", "llama", "--trace", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "traced, plain",
        "traced, sequence parallel",
        "traced, sequence + loss parallel",
    ]
    assert all("8 of 9 kinds of sharded parameters were followed" in line for line in lines[1:])
    assert all("compute with model.embed_tokens.weight" in line for line in lines[1:])


def test_trace_needs_a_model(capsys):
    assert refused_command(capsys, "lint", "llama", "--trace")[0] == ["nothing-to-trace"]


def test_what_the_forward_of_a_lint_cannot_follow_is_said(capsys, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("schema_version: 1\ntensor_parallel: {'0': embedding, '1': colwise, '2': rowwise}\n")
    assert main(["lint", str(path), "--model", "tests.tools.analysis.test_lint:reads_values", "--trace"]) == 1
    assert "traced, plain: not at all: " in capsys.readouterr().out
