"""`verify`: correct plans pass on every kind of mesh; for wrong ones it names the module, the rule and the kind of
mistake."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from parallelize import Verification, assert_verified, load_plan, verify
from parallelize.base.errors import MeshError, ModelError, PlanError
from parallelize.base.mesh import MeshSpec
from parallelize.cli import main
from parallelize.ops import collectives
from parallelize.plan.styles.notation import parse_style
from parallelize.tools.verification.compare import ORDER
from parallelize.tools.verification.configuration import Request, build_configuration
from parallelize.tools.verification.relations import relate
from parallelize.tools.verification.threads import run_ranks

SMALL = {"num_attention_heads": 8, "num_key_value_heads": 2}


def changed(family: str, pattern: str, style: str | None):
    """A shipped plan with one rule of another style, or without it."""
    plan = load_plan(family)
    assert any(rule.pattern == pattern for rule in plan.rules)
    rules = [r if r.pattern != pattern else style and replace(r, style=parse_style(style)) for r in plan.rules]
    return replace(plan, rules=tuple(rule for rule in rules if rule), on_unclaimed="replicate")


def worst(result: Verification) -> float:
    return max(row.error for row in result.rows)


# -- correct plans -----------------------------------------------------------------------------------------------------


@pytest.mark.variants(every=9)
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        *((family, "tp=2") for family in ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2")),
        *((family, "tp=2") for family in ("gpt2", "gpt_neox", "opt", "bert")),
        ("llama-3-8b", "tp=4"),
        ("gpt2", "tp=4"),
        ("llama-3-8b", "tp=8"),
        ("gemma3_text", "tp=8"),
    ],
)
def test_shipped_plans_are_equal_in_every_mode(model, mesh):
    result = verify(model, mesh=mesh)
    assert result.ok, f"\n{result}"
    modes = {"plain", "sequence parallel", "loss parallel", "sequence + loss parallel"}
    assert {row.mode for row in result.rows} == modes
    assert {row.what for row in result.rows} == {
        "loss",
        "outputs",
        "input gradients",
        "gradients",
        "gradient norm",
        "weights",
    }
    assert result.rows[0].bound < 1e-10 and 5 * worst(result) < result.rows[0].bound


@pytest.mark.variants(every=101)
@pytest.mark.parametrize(
    ("model", "mesh", "options"),
    [
        ("gpt2", "dp=2,tp=2", {"zero": 3, "sequence_parallel": True, "loss_parallel": True}),
        ("llama-3-8b", "pp=2,dp=2,tp=2", {"zero": 2, "recompute": "full", "sequence_parallel": True}),
        ("qwen3", "pp=2,tp=2", {"schedule": "zbv", "num_microbatches": 4, "sequence_parallel": True}),
        ("gemma3_text", "dp_replicate=2,dp=2", {"zero": 1}),
        ("llama", "pp=2", {}),
        ("llama", "tp=2", {"overlap": "chunked", "sequence_parallel": True}),
        ("deepseek-v3", "dp=2", {"ep": 2}),
        ("qwen3-235b-a22b", "dp=2,tp=2", {"ep": 4, "sequence_parallel": True}),
        ("gpt_oss", "pp=2,dp=2", {"ep": 2}),
    ],
)
def test_meshes_of_several_axes_are_equal(model, mesh, options):
    result = verify(model, mesh=mesh, **options)
    assert result.ok, f"\n{result}"
    assert {row.what for row in result.rows} == set(ORDER)


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", ["tp=4", "dp=2,tp=2", "cp=2"])
@pytest.mark.parametrize("model", ["phimoe", "mixtral"])
def test_routers_that_draw_noise_draw_that_of_the_ranks(model, mesh):
    """Of both batches, with one microbatch and two."""
    overrides = {"router_jitter_noise": 0.3}
    result = verify(model, mesh=mesh, overrides=overrides)
    assert result.ok, f"\n{result}"


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "slack"), [("float32", 5), ("bfloat16", 3)])
def test_bounds_of_other_dtypes(dtype, slack):
    result = verify("phi3", mesh="tp=4", dtype=dtype, sequence_parallel=True)
    assert result.ok and slack * worst(result) < result.rows[0].bound
    assert worst(result) > 1e-12  # it was really computed in that dtype


@pytest.mark.sweep
@pytest.mark.processes
def test_three_layers_on_eight_ranks_from_the_command_line():
    """How many seconds it takes: python -m benchmarks.predictions."""
    command = [sys.executable, "-m", "parallelize", "verify", "llama-3-8b", "--mesh", "tp=8"]
    subprocess.run(command, check=True, timeout=120, capture_output=True)


# -- what is named -----------------------------------------------------------------------------------------------------


def doubled(x, group):
    return 2 * _stock_reduce(x, group)


_stock_reduce = collectives.reduce_owned


@pytest.mark.variants(every=3)
@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (lambda x, group: x, "missing-reduction"),
        (doubled, "doubled-reduction"),
        (lambda x, group: _stock_reduce(x, group) * 0.5, "wrong-scale"),
        (lambda x, group: _stock_reduce(x, group).flip(-1), "permuted-chunks"),
        (lambda x, group: _stock_reduce(x, group).sin(), "differs"),
    ],
)
def test_a_broken_collective_is_named_with_its_kind(monkeypatch, broken, kind):
    # the embedding is split along its columns, so that only rowwise linears reduce
    monkeypatch.setattr(collectives, "reduce_owned", broken)
    plan = changed("llama", "model.embed_tokens", "embedding_colwise")
    result = verify("llama", plan, "tp=2", sequence_parallel=False, loss_parallel=False)
    assert not result.ok and result.difference is not None
    assert (result.difference.module, result.difference.kind) == ("model.layers.0.self_attn.o_proj", kind)
    assert result.difference.rule == "model.layers.*.self_attn.o_proj: rowwise(heads)"
    assert result.difference.where.endswith("llama.yaml:16:5")


@pytest.mark.variants(every=3)
@pytest.mark.parametrize(
    ("family", "pattern", "style", "module", "kind"),
    [
        ("llama", "model.layers.*.self_attn.o_proj", "colwise", "self_attn.o_proj", "raised"),
        ("llama", "model.layers.*.mlp.{gate,up}_proj", None, "mlp.up_proj", "raised"),
        ("llama", "lm_head", "colwise", "lm_head", "raised"),
        ("qwen3", "model.layers.*.self_attn.{q,k}_norm", "replicate(gradient=full)", "k_norm", "missing-reduction"),
        ("llama", "model.norm", None, "model.norm", "missing-reduction"),
        ("gpt2", "transformer.h.*.attn.c_attn", "sequence", "attn.c_attn", "raised"),
    ],
)
def test_a_wrong_rule_is_named(family, pattern, style, module, kind):
    result = verify(family, changed(family, pattern, style), "tp=2")
    assert not result.ok and result.difference is not None
    assert result.difference.module.endswith(module) and result.difference.kind == kind
    assert not style or result.difference.rule.startswith(f"{pattern}: ")


def test_a_rule_that_is_refused_before_anything_runs():
    with pytest.raises(PlanError, match=r"unclear-gradient: model\.layers\.\*\.self_attn\.q_proj"):
        verify("llama", changed("llama", "model.layers.*.self_attn.q_proj", "sequence"), "tp=2")


def test_a_doubled_gradient_is_named(monkeypatch):
    """Pending reductions are summed twice: the norms' gradients are tp times too large, and everything else is
    right."""
    from parallelize.state import pending_reductions as gradients

    stock = gradients._sum_over

    def twice(group, views):
        stock(group, views)
        for view in views:
            view.mul_(2)

    monkeypatch.setattr(gradients, "_sum_over", twice)
    result = verify("qwen3", None, "tp=2", sequence_parallel=False, loss_parallel=False)
    assert result.difference is not None and result.difference.kind == "doubled-reduction"
    assert "_norm" in result.difference.module and "2 times" in result.difference.explanation


def test_a_wrong_norm_alone_is_named(monkeypatch):
    from parallelize.axes.pipeline import parallel_model

    stock = parallel_model.clip_grad_norm_
    monkeypatch.setattr(parallel_model, "clip_grad_norm_", lambda *args, **options: stock(*args, **options) * 1.5)
    result = verify("llama", None, "tp=2", sequence_parallel=True)
    assert [row.what for row in result.rows if not row.ok] == ["gradient norm"]
    assert result.difference is not None and result.difference.module == "clip_grad_norm_"


def test_one_rank_that_fails_alone_ends_the_run(monkeypatch):
    """The others wait for it in a collective: the run ends at once, and the error is named."""

    def alone(x, group):
        if group.rank == 1:
            raise RuntimeError("broken on rank 1")
        return _stock_reduce(x, group)

    monkeypatch.setattr(collectives, "reduce_owned", alone)
    # it does not wait for the deadline, which is later than pytest's
    result = verify("llama", None, "tp=2", sequence_parallel=False, loss_parallel=False, timeout_s=3600)
    assert result.difference is not None and "broken on rank 1" in result.difference.explanation
    assert result.difference.module == "model.embed_tokens"


# -- relations ---------------------------------------------------------------------------------------------------------

X = torch.arange(24.0, dtype=torch.float64).reshape(3, 8).sin()


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([X, X], "full"),
        ([X[:, :4], X[:, 4:]], "shard(1)"),
        ([X[:2], torch.cat([X[2:], 0 * X[:1]])], "shard(0)"),  # padded
        ([X[:, [0, 1, 4, 5]], X[:, [2, 3, 6, 7]]], "slices(1)"),  # packed
        ([X[:, :2], X[:, :2], X[:, 2:4], X[:, 4:6], X[:, 6:]], "slices(1)"),  # one stored twice
        ([X[:, [4, 5, 0, 1]], X[:, [2, 3, 6, 7]]], "permuted-chunks(1)"),
        ([X[:, :4], X[:, :4]], "permuted-chunks(1)"),  # half of it is missing
        ([X / 4, X * 3 / 4], "missing-reduction"),
        ([2 * X, 2 * X], "doubled-reduction"),
        ([X / 2, X / 2], "wrong-scale"),  # averaged
        ([X / 3, X / 3], "wrong-scale"),
        ([X.flip(1), X.flip(1)], "permuted-chunks"),
        ([X[:, :3], X[:, 3:6]], "permuted-chunks(1)"),
        ([X.cos(), X.cos()], "differs"),
        ([X, X * float("nan")], "not-a-number"),
        ([X.reshape(8, 3), X.reshape(8, 3)], "wrong-shape"),
    ],
)
def test_how_local_tensors_relate_to_the_full_one(parts, kind):
    relation = relate(parts, X, 1e-12)
    assert str(relation) == kind
    assert relation.right == (kind.split("(")[0] in ("full", "shard", "slices"))


# -- models ------------------------------------------------------------------------------------------------------------


def test_one_dimensional_parameters_are_not_ones_and_zeros():
    configuration = build_configuration(Request("qwen2", mesh=MeshSpec(tp=2)))
    for name, parameter in configuration.model.named_parameters():
        if parameter.ndim == 1:
            assert parameter.std() > 0.1, name
        else:
            assert parameter.std() > 0.05, name


class Tower(nn.Module):
    """A plain model with a residual connection, whose input is not ids."""

    def __init__(self, width: int = 12, inner: int = 18):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.head = nn.Linear(width, 7)

    def forward(self, x):
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


def tower(width: int = 12):
    def inputs(batch, sequence):
        return {"x": torch.randn(batch, sequence, width), "targets": torch.randint(0, 7, (batch, sequence))}

    return {"model": Tower(width), "inputs": inputs}


RULES = {"norm": "replicate", "up": "colwise", "down": "rowwise", "head": "replicate"}


@pytest.mark.parametrize("model", [tower, "tests.tools.verification.test_verification:tower"])
def test_a_model_from_a_function(model):
    result = assert_verified(model, RULES, "dp=2,tp=2", overrides={"width": 14})
    assert result.sizes["parameters"] == sum(p.numel() for p in Tower(14).parameters())
    assert "input gradients" in {row.what for row in result.rows}


def test_the_helper_raises_the_report():
    with pytest.raises(AssertionError, match=r"(?s)DIFFERS.*down.*shapes cannot be multiplied"):
        assert_verified(tower, {**RULES, "down": "colwise"}, "tp=2")


def test_mistakes_are_raised():
    with pytest.raises(PlanError, match="uneven-heads"):
        verify("gpt2", mesh="tp=8")
    with pytest.raises(MeshError, match="bad-mesh"):
        verify("gpt2", mesh="tp")
    for wrong in ({"dtype": "float8"}, {"backend": "smoke"}):
        with pytest.raises(ModelError):
            verify("gpt2", **wrong)


# -- the command -------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> int:
    return main(["verify", *arguments])


@pytest.mark.sweep
def test_exit_statuses_and_output(tmp_path, capsys):
    assert command("llama", "--mesh", "tp=2", "--sequence-parallel", "--set", "num_key_value_heads=8") == 0
    assert "the same numbers" in capsys.readouterr().out
    wrong = tmp_path / "wrong.yaml"
    text = Path(load_plan("llama").source).read_text().replace("mlp.down_proj: rowwise", "mlp.down_proj: colwise")
    wrong.write_text(text)
    assert command("llama", "--mesh", "tp=2", "--plan", str(wrong), "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert not data["ok"] and data["difference"]["where"].startswith(str(wrong))
    for wrong in (["--plan", "lama"], ["--mesh", "tp=banana"], ["--microbatches", "0"], ["--timeout", "0"]):
        assert command("llama", "--mesh", "tp=2", *wrong) == 2
        assert not capsys.readouterr().out
        assert command("llama", "--mesh", "tp=2", *wrong, "--json") == 2
        assert json.loads(capsys.readouterr().out)["error"][0]["slug"]


# -- threads -----------------------------------------------------------------------------------------------------------


def test_a_deadlock_of_ranks_fails_at_once():
    import torch.distributed as dist

    def body(rank: int) -> str:
        pair = dist.new_group([0, 1])
        try:
            dist.all_reduce(torch.ones(2), group=pair if rank == 0 else None)
        except RuntimeError as error:
            return str(error)
        return "done"

    results = run_ranks(2, body, timeout_s=3600)  # it does not wait for the deadline, which is later than pytest's
    assert any("wait for each other" in text for text in results)


def test_calls_that_do_not_match_fail_on_every_rank():
    import torch.distributed as dist

    def body(rank: int) -> str:
        with pytest.raises(RuntimeError, match="different things") as error:
            dist.all_reduce(torch.ones(2 + rank))
        return str(error.value)

    assert all("all_reduce [2] float32 on [0]" in text for text in run_ranks(2, body))


def test_a_rank_keeps_values_of_parametrized_parameters_for_its_own_block():
    """PyTorch keeps them once for a process, and drops them when no block is open: that of the first rank is."""
    opened = threading.Barrier(2)

    def body(rank: int) -> list[float]:
        layer = nn.Linear(1, 1, bias=False)
        parametrize.register_parametrization(layer, "weight", nn.ReLU())
        read = []
        with parametrize.cached() if rank == 0 else nullcontext():
            opened.wait()
            for value in (1.0, 2.0):
                with torch.no_grad():
                    layer.parametrizations.weight.original.fill_(value)
                with parametrize.cached():
                    read.append(float(layer.weight))
            opened.wait()
        return read

    assert run_ranks(2, body) == [[1.0, 1.0], [1.0, 2.0]]
