"""What a review of `explain`, `fit` and `lint` found: each of these was wrong once."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import explain, lint
from parallelize.analysis.machine import load_machine
from parallelize.analysis.memory import memory_of
from parallelize.analysis.setting import Setting
from parallelize.analysis.subject import Subject
from parallelize.cli import main
from parallelize.errors import MeshError, ModelError, ParallelizeError, PlanError
from parallelize.mesh import MeshSpec
from parallelize.model_source import ModelSource, source_of
from tests.support.models import COMMON, FAMILIES, tiny_model

PLAN = {"embed": "embedding", "layers.*": "colwise(output=full)", "head": "colwise(output=full)"}


class Numbered(nn.Module):
    """A forward in which a layer's number decides what it does."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.head = nn.Linear(16, 37)

    def forward(self, ids):
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = layer(layer(x)) if number % 2 else layer(x)
        return self.head(x)


class Reused(Numbered):
    """One module in several places."""

    def __init__(self):
        super().__init__()
        self.layers[4] = self.layers[5] = self.layers[3]


class Skipping(Numbered):
    """What early layers return is used by late ones."""

    def forward(self, ids):
        x, kept = self.embed(ids), []
        for layer in self.layers[:4]:
            x = torch.relu(layer(x))
            kept.append(x * 2)
        for layer in self.layers[4:]:
            x = torch.relu(layer(x + kept.pop()))
        return self.head(x)


class Private(Numbered):
    """Layers that differ in what is no public attribute."""

    def __init__(self):
        super().__init__()
        for number, layer in enumerate(self.layers):
            layer._twice = number == 5
            if number == 4:
                layer.forward = lambda x, layer=layer: torch.tanh(F.linear(x, layer.weight, layer.bias))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(layer(x)) if layer._twice else layer(x)
        return self.head(x)


@pytest.mark.parametrize("kind", [Numbered, Reused, Skipping, Private])
def test_layers_that_only_look_alike_are_all_run(kind):
    few, every = (explain(kind, PLAN, "tp=2", sequence=8, every_layer=full) for full in (False, True))
    assert [(t.axis, t.count, t.bytes) for t in few.ranks[0].totals] == [
        (t.axis, t.count, t.bytes) for t in every.ranks[0].totals
    ]
    assert few.ranks[0].flops == every.ranks[0].flops
    assert few.ranks[0].memory.activations == every.ranks[0].memory.activations


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bert", "gemma2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_peak_of_a_pipeline_does_not_grow_with_its_microbatches(family, schedule):
    """What is in flight under 1F1B and ZB-V is bounded by the stages; each microbatch leaves its loss and little else."""
    source = ModelSource(family, lambda _: tiny_model(family, num_hidden_layers=4))
    subject, found = Subject(source), []
    for count in (16, 64):
        setting = Setting(MeshSpec(pp=2), batch=count, sequence=17, num_microbatches=count, schedule=schedule)
        found.append([memory_of(subject.rank_step(setting, setting.pipeline(), rank)).activations for rank in (0, 1)])
    assert all(few <= many <= few * 1.03 for few, many in zip(*found, strict=True)), found


def test_a_module_on_two_stages_is_refused():
    with pytest.raises(PlanError) as caught:
        explain(Reused, None, "pp=4", sequence=8, batch=8)
    assert "reused-module" in caught.value.slugs


@pytest.mark.parametrize(
    ("mesh", "options", "slug"),
    [
        ("tp=2,dp=2", {"zero": 1}, "axis-order"),
        ("dp=2,dp_replicate=2", {"zero": 3}, "axis-order"),
        ("tp=2", {"overlap": "foo"}, "bad-option"),
        ("tp=2", {"transport": "foo"}, "bad-option"),
        ("tp=2", {"batch": 0}, "bad-option"),
        ("tp=2", {"sequence": 0}, "bad-option"),
        ("tp=2", {"sequence": "8"}, "bad-option"),
        ("tp=2", {"zero": "2"}, "bad-zero-stage"),
        ("tp=2", {"recompute_every": 0, "recompute": "full"}, "bad-option"),
        ("tp=2", {"wrong": 1}, "unknown-option"),
        ("", {}, "no-axes"),
        (4, {}, "bad-mesh"),
    ],
)
def test_mistakes_have_names(mesh, options, slug):
    with pytest.raises(ParallelizeError) as caught:
        explain(Numbered, None if mesh == "" else PLAN, mesh, **{"sequence": 8, **options})
    assert slug in caught.value.slugs


def test_dtypes_of_torch_are_understood():
    found = explain(Numbered, PLAN, "tp=2", sequence=8, dtype=torch.bfloat16)
    assert found.options["dtype"] == "bfloat16"


class Scalar(Numbered):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids):
        return super().forward(ids) * self.scale


def test_a_scalar_under_zero_3_is_refused_as_it_is_in_a_run():
    with pytest.raises(ModelError) as caught:
        explain(Scalar, None, "dp=2", sequence=8, zero=3)
    assert caught.value.slugs == ("scalar-parameter",)


def test_deferred_reductions_keep_whole_gradients():
    peaks = [
        explain(Numbered, None, "dp=4", sequence=4, batch=2, num_microbatches=2, zero=2, defer=defer).peak_bytes
        for defer in (False, True)
    ]
    assert peaks[1] > peaks[0]


def test_one_group_of_zero_3_is_held_whole_at_the_end_of_backward():
    """Without units the whole model is gathered, beside its whole gradients and what is scattered of them."""
    found = explain(Numbered, None, "dp=4", sequence=4, zero=3)
    whole = 4 * sum(p.numel() for p in Numbered().parameters())
    assert found.peak_bytes > 3 * whole


@pytest.mark.parametrize(
    "head", ["LlamaForSequenceClassification", "LlamaModel", "BertModel", "GPT2ForSequenceClassification"]
)
def test_models_without_a_head_of_logits_are_right(head):
    import transformers

    family = next(name for name in ("llama", "bert", "gpt2") if head.lower().startswith(name))
    config_name, _, sizes = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**COMMON, **sizes})
    found = lint(lambda: getattr(transformers, head)(config), None, "tp=2")
    assert not [one for one in found if one.severity == "error"], [str(one.problem) for one in found]


class Odd(nn.Module):
    """Attention whose values are wider than its queries, with a learned bias; and a forward whose self has another name."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.bias = nn.Parameter(torch.zeros(8, 8))
        self.value = nn.Linear(16, 24)
        self.head = nn.Linear(24, 37)

    def forward(s, ids):  # noqa: N805
        x = s.embed(ids)[:, None]
        return s.head(F.scaled_dot_product_attention(x, x, s.value(x), attn_mask=s.bias)[:, 0])


def test_attention_that_no_fused_kernel_serves():
    assert explain(Odd, None, "dp=2", sequence=8).ranks[0].flops > 0


def test_links_of_huge_meshes_are_arithmetic():
    began = time.perf_counter()
    load_machine("h100-sxm").link(MeshSpec(dp=100_000_000, tp=8), "dp")
    assert time.perf_counter() - began < 0.1


@pytest.mark.parametrize("text", ["node_ranks: .nan", "node_ranks: .inf", "node_ranks: 0.5", "node_ranks: -8"])
def test_constants_that_are_no_numbers(tmp_path, text):
    right = (load_machine.__globals__["PROFILES"] / "cpu.yaml").read_text(encoding="utf-8")
    lines = [text if line.startswith("node_ranks") else line for line in right.splitlines()]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(PlanError) as caught:
        load_machine(path)
    assert "node_ranks" in str(caught.value)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError):
        load_machine(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "gpt2", "--gpus", "2", "--dtype", "foo"],
        ["fit", "gpt2", "--gpus", "2", "--show", "0"],
        ["fit", "gpt2", "--gpus", "2", "--global-batch", "0"],
        ["fit", "gpt2", "--gpus", "2", "--optimizer", "foo"],
        ["explain", "gpt2", "--mesh", "tp=2", "--recompute", "full", "--recompute-every", "0"],
        ["explain", "gpt2", "--mesh", "tp=2", "--microbatches", "0"],
        ["explain", "gpt2", "--mesh", ""],
    ],
)
def test_the_command_line_names_mistakes(arguments, capsys):
    assert main(arguments) == 2
    assert "fix" in capsys.readouterr().err


def test_parallelize_model_refuses_the_order_too(tmp_path):
    import torch.distributed as dist

    from parallelize import build_mesh, parallelize_model

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(MeshError) as caught:
            parallelize_model(source_of(Numbered).build("cpu"), build_mesh("cpu", tp=1, dp=1), PLAN, zero=1)
        assert caught.value.slugs == ("axis-order",)
    finally:
        dist.destroy_process_group()
