"""`explain`, `fit` and their parts, in one process."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallelize.base.errors import MeshError, ModelError, ParallelizeError, PlanError
from parallelize.base.mesh import MeshSpec
from parallelize.plan.models.model_source import ModelSource, read_model
from parallelize.tools.analysis.automatic_trace import trace_copy
from parallelize.tools.analysis.cost.machine import known_machines, load_machine
from parallelize.tools.analysis.cost.memory import memory_of
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.explain import changes, explain, explain_subject
from parallelize.tools.analysis.fit import fit, meshes
from parallelize.tools.analysis.linting import lint
from parallelize.tools.analysis.measure import model_flops
from parallelize.tools.analysis.subject import Subject
from tests.support.models import tiny_model

SMALL = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, vocab_size=131)
FAMILIES = {
    "llama": dict(SMALL, num_hidden_layers=7),
    "gemma2": dict(SMALL, num_hidden_layers=7, sliding_window=5, head_dim=16),
    "gemma3_text": dict(SMALL, num_hidden_layers=9, sliding_window=5, head_dim=16),
    "gpt2": dict(n_embd=64, n_layer=6, n_head=4, vocab_size=131, n_positions=64),
}


def subject(family: str, **more) -> Subject:
    return Subject(read_model(family, {**FAMILIES[family], **more}))


# -- equal layers -------------------------------------------------------------------------------------------------


@pytest.mark.variants(every=10)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", ["off", "full"])
def test_layers_analyzed_once_give_the_figures_of_all_layers(family, recompute):
    modes = dict(sequence_parallel=True, recompute=recompute)
    setting = Setting(MeshSpec(pp=2, dp=2, tp=2), batch=4, sequence=16, num_microbatches=4, zero=1, **modes).complete()
    model = subject(family)
    for rank in range(2):
        few, every = (model.rank_step(setting, setting.pipeline(), rank, every_layer) for every_layer in (False, True))
        assert sorted(few.messages) == sorted(every.messages)
        a, b = memory_of(few), memory_of(every)
        assert (a.activations, a.peak) == (b.activations, b.peak)
        for stage in few.local_stages:
            segments, all_segments = few.segments(stage, True), every.segments(stage, True)
            assert sum(s.flops for s in segments.forward) == sum(s.flops for s in all_segments.forward)
            assert sum(s.flops for s in segments.backward) == sum(s.flops for s in all_segments.backward)


def test_layers_of_different_kinds_are_not_equal():
    gemma = subject("gemma3_text")
    setting = Setting(MeshSpec(tp=2), sequence=16).complete()
    representatives = gemma.trace(setting).representatives
    kinds = gemma.source.config.layer_types
    for unit, other in representatives.items():
        if ".layers." in unit:
            assert kinds[int(unit.rpartition(".")[2])] == kinds[int(other.rpartition(".")[2])]
    assert len(set(representatives.values())) < len(representatives)


# -- arithmetic that can be done by hand --------------------------------------------------------------------------


def test_bytes_by_hand():
    """Llama without sequence parallelism: two all-reduces a layer and direction of [batch, sequence, hidden]."""
    setting = Setting(MeshSpec(tp=2), sequence=16, batch=1)
    explanation = explain_subject(subject("llama"), setting, load_machine("cpu"))
    size = 1 * 16 * 64 * 4
    lines = [
        m for m in explanation.ranks[0].messages if m.module.endswith(("o_proj", "down_proj")) and m.phase == "forward"
    ]
    assert [(line.op, line.axis, line.bytes, line.count) for line in lines] == [("all_reduce", "tp", size, 7)] * 2
    assert all(line.sent_bytes == 7 * size for line in lines)  # 2 (n - 1) / n of it, n = 2


def test_flops_by_hand():
    """Matmuls of one layer and the head: 2 m n k each, attention halved."""
    llama = subject("llama")
    setting = Setting(MeshSpec(dp=1), sequence=16).complete()
    step = llama.rank_step(setting, setting.pipeline(), 0)
    flops = {segment.unit: segment.flops for segment in step.segments(0, True).forward}
    s, h, kv, f, v = 16, 64, 32, 96, 131
    layer = 2 * s * (h * h + 2 * h * kv + h * h + 3 * h * f) + 2 * 2 * s * s * h * 0.5
    assert flops["model.layers.3"] == layer
    assert flops["lm_head"] == 2 * s * h * v


@pytest.mark.parametrize("mesh", [MeshSpec(dp=2), MeshSpec(tp=2)], ids=str)
def test_model_flops_of_llama_4_are_those_of_chosen_experts(mesh):
    """Its stock forward multiplies every token by all experts. Three more experts add their columns of two routers."""
    setting = Setting(mesh, batch=2, sequence=16).complete()
    few, more = (
        model_flops(
            Subject(ModelSource("llama4", lambda _, n=n: tiny_model("llama4_text", num_local_experts=n))), setting
        )
        for n in (3, 6)
    )
    tokens, hidden = 2 * mesh.ranks("dp") * 16, 48
    assert more - few == pytest.approx(3 * 2 * tokens * hidden * 3 * 2)


@pytest.mark.sweep
def test_bubble_and_time():
    """Equal stages under 1F1B: (p - 1) / (m + p - 1) of the time is idle."""
    explanation = explain(subject("gpt2").source, None, "pp=2", sequence=32, batch=8, num_microbatches=8)
    assert 0.05 < explanation.time.bubble_fraction < 0.3
    assert explanation.time.overlapped_s <= explanation.time.in_turn_s
    assert explanation.time.mfu_overlapped >= explanation.time.mfu_in_turn > 0


@pytest.mark.sweep
def test_overlapping_hides_messages():
    options = dict(sequence=64, batch=1, sequence_parallel=True)
    source = subject("llama").source
    off, on = (explain(source, None, "tp=4", overlap=overlap, **options).time for overlap in ("off", "auto"))
    assert on.overlapped_s < off.overlapped_s and on.in_turn_s == off.in_turn_s


@pytest.mark.sweep
def test_recompute_and_zero_need_less_memory():
    llama, machine = subject("llama", vocab_size=128), load_machine("cpu")
    plain = Setting(MeshSpec(dp=4, tp=2), batch=2, sequence=32).complete()
    settings = [("plain", plain), *changes(plain)]
    explanations = {name: explain_subject(llama, setting, machine) for name, setting in settings}
    assert (
        explanations["--recompute full"].ranks[0].memory.activations < explanations["plain"].ranks[0].memory.activations
    )
    states = [explanations[name].ranks[0].memory.optimizer for name in ("plain", "--zero 1", "--zero 2", "--zero 3")]
    assert states[0] == 4 * states[1] == 4 * states[2] == 4 * states[3]
    grads = [explanations[name].ranks[0].memory.gradients for name in ("--zero 1", "--zero 2")]
    assert 3.9 < grads[0] / grads[1] < 4.1
    assert explanations["plain"].activations_with_recompute < explanations["plain"].activations_without_recompute


# -- models and mistakes ---------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A model without a config or a shipped plan."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = nn.Embedding(37, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 37)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def test_a_model_of_a_function_without_tp():
    explanation = explain(Odd, None, "pp=2,dp=2", sequence=8, batch=4, num_microbatches=4, zero=1)
    assert [rank.pp_rank for rank in explanation.ranks] == [0, 1]
    assert {total.axis for total in explanation.ranks[0].totals} == {"pp", "dp", "world"}
    assert explanation.num_parameters == sum(p.numel() for p in Odd().parameters())
    assert explanation.plan == "none"


def test_a_dict_of_style_words():
    explanation = explain(Odd, {"blocks.*": "colwise(output=full)", "head": "colwise(output=full)"}, "tp=2", sequence=8)
    assert {m.module for m in explanation.ranks[0].messages} >= {"blocks.*", "head"}


def test_mistakes_are_reported_before_anything_runs():
    mistakes = [
        (dict(mesh="tp=3"), "uneven-heads"),
        (dict(mesh="pp=16,tp=2", batch=32), "more-stages-than-layers"),
        (dict(mesh="tp=2", zero=1), "no-data-axis"),
        (dict(mesh="tp=2,ep=2"), "unknown-axis"),
        (dict(mesh="tp=2", dtype="float12"), "bad-option"),
        (dict(mesh="pp=2", batch=3, num_microbatches=4), "indivisible-batch"),
        (dict(mesh="tp=2", hardware="abacus"), "unknown-hardware"),
    ]
    for options, slug in mistakes:
        with pytest.raises(ParallelizeError) as caught:
            explain(subject("llama").source, None, options.pop("mesh"), **options)
        assert slug in caught.value.slugs, slug
    assert not dist.is_initialized()


class Peeks(Odd):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.numpy().max() > 3:  # reads values
            return super().forward(ids)
        raise AssertionError


def test_a_forward_that_reads_values_is_an_error():
    with pytest.raises(ModelError) as caught:
        explain(Peeks, None, "dp=1", sequence=8)
    assert caught.value.slugs == ("cannot-record",)
    assert not dist.is_initialized()


def test_an_existing_process_group_is_not_changed(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(MeshError) as caught:
            explain(subject("llama").source, None, "tp=2", sequence=8)
        assert caught.value.slugs == ("process-group-taken",)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.sweep
def test_ties_are_counted_once():
    explanation = explain(subject("gpt2").source, None, "tp=2", sequence=8)
    model = read_model("gpt2", FAMILIES["gpt2"]).build("cpu")
    assert explanation.num_parameters == sum(p.numel() for p in model.parameters())
    assert any(" = " in line.name for line in explanation.parameters)


@pytest.mark.sweep
def test_json_is_json():
    explanation = explain(subject("gpt2").source, None, "pp=2,tp=2", sequence=16, batch=4)
    again = json.loads(json.dumps(explanation.as_dict(moments=10)))
    assert again["peak_bytes"] == explanation.peak_bytes and len(again["ranks"][0]["memory"]["moments"]) <= 10
    highest = max(moment[3] for moment in again["ranks"][0]["memory"]["moments"])
    assert highest == max(moment.peak for moment in explanation.ranks[0].memory.moments)


# -- machines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known_machines())
def test_every_constant_has_a_source(name):
    machine = load_machine(name)
    assert all(machine.sources.values())
    assert machine.memory_bytes > 1e9


def test_a_file_with_missing_constants_names_them(tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text("name: custom\nmemory_bytes: {value: lots, source: me}\n")
    with pytest.raises(PlanError) as caught:
        load_machine(path)
    text = str(caught.value)
    assert "memory_bytes " in text and "between.latency_us" in text and "'lots'" in text


def test_links_follow_the_mesh():
    machine = load_machine("h100-sxm")
    spec = MeshSpec(dp=4, tp=8)
    assert machine.placement(spec, "tp").nodes == 1
    assert machine.placement(spec, "dp").nodes > 1
    assert machine.placement(MeshSpec(tp=4, dp=2), "dp").nodes == 1


# -- fit ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_fit_finds_what_fits_and_says_why_not():
    machine = load_machine("cpu")
    llama = subject("llama")
    wide = fit(llama, 4, machine, memory_bytes=1e9, global_batch=8, sequence=32, dtype=None)
    assert [c.step_s for c in wide.best] == sorted(c.step_s for c in wide.best)
    assert all(c.setting.mesh.world_size == 4 and c.peak_bytes <= 0.92e9 for c in wide.best)
    assert all(c.setting.tokens == 8 * 32 for c in wide.best)
    tight = min(c.peak_bytes for c in wide.best) / 0.92 * 1.5
    narrow = fit(llama, 4, machine, memory_bytes=tight, global_batch=8, sequence=32, dtype=None)
    assert any("memory" in r.reason or "do not fit" in r.reason for r in narrow.rejected)
    assert all(c.peak_bytes <= tight * 0.92 for c in narrow.best)
    with pytest.raises(ModelError) as caught:
        fit(llama, 4, machine, memory_bytes=1e3, global_batch=8, sequence=32, dtype=None)
    assert caught.value.slugs == ("nothing-fits",)


def test_meshes_multiply_to_the_devices():
    for spec in meshes(24, 8, 6):
        assert spec.world_size == 24 and spec.size("tp") <= 8 and spec.size("pp") <= 6


@pytest.mark.sweep
def test_fit_and_explain_agree():
    machine, llama = load_machine("cpu"), subject("llama")
    best = fit(llama, 4, machine, memory_bytes=1e9, global_batch=8, sequence=32, dtype=None, most=1).best[0]
    explanation = explain_subject(llama, best.setting, machine)
    assert explanation.time.step_s == best.step_s and explanation.peak_bytes == best.peak_bytes


@pytest.mark.sweep
def test_advice_and_explain_agree():
    machine, llama = load_machine("cpu"), subject("llama")
    now = Setting(MeshSpec(dp=2, tp=2), batch=2, sequence=64).complete()
    listed = {advice.change: advice for advice in explain_subject(llama, now, machine, advice=True).advice}
    assert listed
    for change, setting in changes(now):
        if change in listed:
            changed = explain_subject(llama, setting, machine)
            assert (changed.time.step_s, changed.peak_bytes) == (listed[change].step_s, listed[change].peak_bytes)


@pytest.mark.sweep
def test_cp_splits_the_work_of_a_sequence():
    """The same tokens take the same operations on any mesh."""
    options = {"sequence": 4096, "dtype": "bfloat16", "weights_dtype": "float32"}
    over_dp = explain("llama-3-8b", None, "dp=4", batch=1, **options)
    over_cp = explain("llama-3-8b", None, "cp=4", batch=4, **options)
    assert over_cp.time.flops == pytest.approx(over_dp.time.flops, rel=0.1)
    assert over_cp.time.mfu_overlapped == pytest.approx(over_dp.time.mfu_overlapped, rel=0.3)  # messages are overlapped
    both = explain("llama-3-8b", None, "cp=4", batch=4, ulysses=4, **options)
    assert {line.op for line in both.ranks[0].messages if line.axis == "cp"} == {"all_reduce", "all_to_all"}


@pytest.mark.sweep
def test_what_folded_experts_send_on_1024_ranks_by_hand():
    """Eight layers of Qwen3 235B, two on a stage; one sequence in a microbatch, whose tokens are divided over `tp`."""
    model = read_model("qwen3-235b-a22b", {"num_hidden_layers": 8})
    options = {"ep": 64, "batch": 16, "num_microbatches": 16, "sequence": 4096, "dtype": "bfloat16", "zero": 1}
    explanation = explain(model, None, "pp=4,dp=32,tp=8", sequence_parallel=True, **options)
    lines = [line for line in explanation.ranks[0].messages if line.axis == "ep"]
    rows = 4096 // 8 * 8  # of each token eight, to other ranks of 64
    hidden, weights, choices = 4096 * 2, 8 * 2, 8 * 4  # bytes of a row
    sizes = [rows * (hidden + weights + choices), rows * hidden, rows * hidden, rows * (hidden + weights)]
    assert [line.bytes for line in lines[1:]] == sizes  # after the exchange of counts
    for line in lines[1:]:
        assert line.ranks == 64 and line.count == 2 * 16
        assert line.sent_bytes == line.bytes * line.count * 63 / 64


# -- large models -------------------------------------------------------------------------------------------------

# how many seconds they take: python -m benchmarks.predictions
SIZES = [
    ("llama-3-8b", "dp=8,tp=8", []),
    pytest.param(
        *("llama-3-70b", "pp=4,dp=32,tp=8", ["--batch", "16", "--microbatches", "16"]), marks=pytest.mark.sweep
    ),
    pytest.param(
        "llama-3.1-405b",
        "pp=16,dp=128,tp=8",
        ["--batch", "32", "--microbatches", "32", "--schedule", "interleaved_1f1b", "--stages-per-rank", "7"],
        marks=pytest.mark.sweep,
    ),
    *(
        pytest.param(
            name, "pp=4,dp=32,tp=8", ["--ep", "64", "--batch", "16", "--microbatches", "16"], marks=pytest.mark.full
        )
        for name in ("qwen3-235b-a22b", "deepseek-v3")
    ),
]

# the command prints its own peak, because the one that wait4 gives starts at the peak of this large process
MEASURED = """
import atexit, sys
from parallelize.cli import main
atexit.register(lambda: sys.stderr.write(open("/proc/self/status").read()))
sys.exit(main())
"""


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize(("model", "mesh", "more"), SIZES)
def test_large_models_are_explained_in_little_memory(tmp_path, model, mesh, more):
    """Imports and advice included."""
    command = [sys.executable, "-c", MEASURED, "explain", model, "--mesh", mesh, "--sequence", "8192"]
    command += ["--dtype", "bfloat16", "--zero", "1", "--sequence-parallel", "--loss-parallel", "--json", *more]
    with (tmp_path / "out.json").open("wb") as out:
        process = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
    assert process.returncode == 0, process.stderr
    peak_kb = int(re.findall(r"^VmHWM:\s+(\d+) kB$", process.stderr, re.MULTILINE)[-1])
    assert peak_kb < 1.5e6
    assert json.loads((tmp_path / "out.json").read_text())["num_parameters"] > 8e9


@pytest.mark.sweep
def test_offloaded_state_is_not_on_the_device():
    """Float32 copies of bfloat16 weights stay, as they are no state."""
    options = dict(sequence=16, batch=2, zero=1, dtype="bfloat16")
    stored, offloaded = (
        explain(subject("llama").source, None, "dp=2", offload_state=offload, **options).ranks[0].memory
        for offload in (False, True)
    )
    assert stored.optimizer == 3 * offloaded.optimizer > 0 and stored.parameters == offloaded.parameters


class MakesConstants(nn.Module):
    """A forward that says no device for what it makes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-torch.arange(16.0) / 3)
        width = int(torch.tensor([8.0, 16.0]).max())  # whose values are read
        return self.down(self.up(x * frequencies[:width]).relu())


def test_constants_and_inputs_on_the_cpu_meet_a_model_without_values():
    inputs = {"x": torch.randn(2, 4, 16), "targets": torch.randn(2, 4, 16)}
    extras = {"inputs": lambda batch, length: dict(inputs), "loss": lambda out, y: (out - y).square().sum()}
    source = ModelSource("MakesConstants", lambda _: MakesConstants(), extras={**extras, "count": lambda y: y.numel()})
    plan = {"up": "colwise", "down": "rowwise"}
    messages = explain(source, plan, "tp=2").ranks[0].messages
    assert {(line.op, line.module) for line in messages if line.phase == "forward"} == {("all_reduce", "down")}
    assert not lint(source, plan, "tp=2")
    resolved = Subject(source, plan).resolved(Setting(MeshSpec(tp=2)))
    assert trace_copy(MakesConstants(), resolved, inputs={"x": inputs["x"]}).followed
