"""Planned models whose collectives are overlapped with their matmuls equal the unsharded model, and report it."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from parallelize import (
    ColwiseParallel,
    LinkProfile,
    PrepareModuleInput,
    all_gather_linear,
    build_mesh,
    calibrate,
    deferred_gradients,
    full_gradients,
    overlap_counts,
    overlap_report,
    parallelize_module,
)
from parallelize.base.errors import ModelError, ParallelizeError, PlanError
from parallelize.plan.plan_file import parse_plan
from tests.axes.tensor.test_planned_equals_unsharded import MODE_IDS, MODES, prepared
from tests.support.models import FAMILIES
from tests.support.parity import compare, loss_of, planned_run, worst
from tests.support.threads import run_ranks


def check(family: str, tp: int, mode: tuple[bool, bool], overlap: str, dtype: torch.dtype, **overrides: Any) -> list:
    model, expected, data = prepared(family, dtype, tuple(sorted(overrides.items())))
    models = [copy.deepcopy(model) for _ in range(tp)]
    options = {"sequence_parallel": mode[0], "loss_parallel": mode[1], "overlap": overlap}

    def body(rank: int) -> dict:
        compare(planned_run(models[rank], tp, data, **options), expected, dtype)
        return overlap_counts(models[rank])

    return run_ranks(tp, body)


@pytest.mark.variants(every=21)
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=[MODE_IDS[0], MODE_IDS[3]])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked(family, tp, mode):
    counts = check(family, tp, mode, "chunked", torch.float64)
    for name, (calls, overlapped) in counts[0].items():  # without gradients a replicated input sends nothing: one call
        assert overlapped in (calls, calls - 1) and overlapped > 0, name
    assert counts[0]


# -- blocks that do unusual things with their input --------------------------------------------------------------------


class Mlp(nn.Module):
    """Two column linears on one input and a row linear, with whatever `how` says in between."""

    def __init__(self, how: str, inner: int = 12):
        super().__init__()
        self.how, self.calls = how, 0
        self.a, self.b, self.c = nn.Linear(8, inner), nn.Linear(8, inner), nn.Linear(inner, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.how == "writes to its input":
            x.mul_(2.0)
        if self.how == "derives another input":
            return self.c(self.a(x.tanh()) * self.b(x + 1))
        if self.how == "calls one without gradients":
            with torch.no_grad():
                gate = self.a(x)
            return self.c(gate * self.b(x))
        if self.how == "recomputes inside":
            return self.c(checkpoint(lambda h: self.a(h).tanh() * self.b(h), x, use_reentrant=False))
        if self.how == "calls one twice":
            return self.c(self.a(x).tanh() * self.a(x) + self.b(x))
        if self.how == "uses its input besides":
            return self.c(self.a(x) * self.b(x)) + self.c(self.a(x.flip(-1)))
        if self.how == "skips one now and then" and self.calls % 2:
            return self.c(self.b(x))
        return self.c(self.a(x) * self.b(x))


class Stack(nn.Module):
    def __init__(self, how: str, inner: int = 12):
        super().__init__()
        self.layers = nn.ModuleList(Layer(how, inner) for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Layer(nn.Module):
    def __init__(self, how: str, inner: int):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Mlp(how, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


STACK_PLAN = parse_plan(
    """
schema_version: 1
sequence_parallel: {layers: layers, leave: norm}
tensor_parallel:
  layers.*:
    norm: sequence
    mlp: gather
    mlp.{a,b}: colwise
    mlp.c: rowwise
  norm: sequence
"""
)


def stack(how: str, inner: int = 12) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = Stack(how, inner).double()
    return model, torch.randn(2, 7, 8, dtype=torch.float64)


def gradients(model: nn.Module, x: torch.Tensor, steps: int = 2) -> tuple[torch.Tensor, dict]:
    for _ in range(steps):
        out = model(x)
        out.sin().sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


# overlap is predicted to be faster everywhere
FAST = LinkProfile(latency_us=0.0, bytes_per_s=1e6, flops=1e6, step_us=0.0, hidden={"chunked": 1.0})


def on_ranks(model: nn.Module, body: Any, ranks: int = 2, profile: LinkProfile | None = None, **options: Any) -> None:
    """`body(planned copy of a stack)` on every rank."""
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def run(rank: int) -> None:
        mesh = build_mesh("cpu", tp=ranks)
        if profile is not None:
            calibrate(mesh, torch.float64, profile)
        body(parallelize_module(models[rank], mesh, STACK_PLAN, **{"overlap": "chunked", **options}))

    run_ranks(ranks, run)


def check_steps(planned: nn.Module, x: torch.Tensor, expected: tuple[torch.Tensor, dict], steps: int = 2) -> None:
    actual, _ = gradients(planned, x, steps)
    assert worst({"": actual}, {"": expected[0]})[0] < 1e-12
    assert worst(full_gradients(planned), expected[1])[0] < 1e-12


HOWS = [
    "derives another input",
    "calls one without gradients",
    "recomputes inside",
    "calls one twice",
    "uses its input besides",
    "skips one now and then",
    "as usual",
]


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("how", HOWS)
def test_a_block_that(how, sequence_parallel):
    model, x = stack(how)
    expected = gradients(copy.deepcopy(model), x, 3)
    options = {
        "sequence_parallel": sequence_parallel,
        "overlap": "auto" if how == "derives another input" else "chunked",
    }
    on_ranks(model, lambda planned: check_steps(planned, x, expected, 3), profile=FAST, **options)


@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_a_block_that_writes_to_its_input(sequence_parallel, inference):
    """Its matmuls ran before the write: their results are not used."""
    model, x = stack("writes to its input")
    with torch.no_grad():
        expected = model(x)

    def body(planned: nn.Module) -> None:
        with inference():
            assert (planned(x) - expected).abs().max() < 1e-12

    on_ranks(model, body, sequence_parallel=sequence_parallel)


def test_linears_that_never_read_the_block_input_are_an_error():
    model, x = stack("derives another input")

    def body(planned: nn.Module) -> None:
        with pytest.raises(ModelError, match=r"(?s)overlap-unused.*layers\.0\.mlp.*none of its linears.*overlap=off"):
            planned(x)

    on_ranks(model, body, sequence_parallel=True)


def test_a_matmul_whose_result_is_never_read_is_not_run_forever():
    """A linear that is skipped three times in a row is left to itself; a block skipped once is not an error."""
    model, x = stack("as usual")

    def body(planned: Any) -> None:
        planned(x)
        for _ in range(3):
            planned.layers[0].mlp.how = "derives another input"
            planned(x)
        shared = planned.layers[0].mlp._applied.planned.overlap
        assert shared.misses == [3, 3]
        assert overlap_counts(planned)["layers.0.mlp"] == (4, 1)
        planned.layers[0].mlp.how = "as usual"
        assert (planned(x) - model(x)).abs().max() < 1e-12

    on_ranks(model, body)


@pytest.mark.parametrize("tp", [3, 4])
def test_auto_with_uneven_widths(tp):
    """Ranks with other widths choose alike: 9 over 4 leaves the last rank nothing."""
    model, x = stack("as usual", inner=9)
    expected = gradients(copy.deepcopy(model), x)

    def body(planned: nn.Module) -> None:
        check_steps(planned, x, expected)
        assert all(fused == calls for calls, fused in overlap_counts(planned).values())

    on_ranks(model, body, tp, FAST, sequence_parallel=True, overlap="auto")


def test_auto_of_a_call_with_uneven_widths():
    def body(rank: int) -> None:
        calibrate(build_mesh("cpu", tp=2), torch.float64, FAST)
        x, weight = torch.ones(4, 6).double(), torch.ones(600 if rank else 3, 6).double()
        out = all_gather_linear(x, weight, group=dist.group.WORLD)
        assert out.shape == (8, len(weight)) and bool((out == 6).all())

    run_ranks(2, body)


# -- passes that are cut in two, or run again --------------------------------------------------------------------------


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("recompute", [None, False, True], ids=["plain", "recompute", "reentrant"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_deferred_weight_gradients(sequence_parallel, recompute):
    """Every overlapped weight gets its gradient when asked for, replicated key/value heads too."""
    model, expected, data = prepared("llama", torch.float64, (("num_key_value_heads", 1),))
    models = [copy.deepcopy(model) for _ in range(2)]
    ids, labels = data[0]

    def body(rank: int) -> None:
        planned = models[rank]
        options = {"sequence_parallel": sequence_parallel, "overlap": "chunked"}
        parallelize_module(planned, build_mesh("cpu", tp=2), **options)
        if recompute is not None:
            planned.gradient_checkpointing_enable({"use_reentrant": recompute})
            if recompute:
                planned.enable_input_require_grads()
        deferred = deferred_gradients(planned)
        loss = loss_of(planned(input_ids=ids).logits, labels)
        with deferred.deferring():
            loss.backward()
        assert len(deferred) > 0 and planned.model.layers[0].self_attn.k_proj.weight.grad is None
        deferred.compute()
        assert len(deferred) == 0
        assert worst(full_gradients(planned), expected["grads"])[0] < 1e-12

    run_ranks(2, body)


def test_a_failure_in_a_forward_and_then_a_step():
    model, expected, data = prepared("llama", torch.float64)
    models = [copy.deepcopy(model) for _ in range(2)]
    ids, labels = data[0]

    def body(rank: int) -> None:
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2), sequence_parallel=True, overlap="chunked")
        handle = planned.model.layers[0].self_attn.k_proj.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            planned(input_ids=ids)
        handle.remove()
        assert planned.model.layers[0].self_attn._applied.planned.overlap.depth == 0
        loss_of(planned(input_ids=ids).logits, labels).backward()
        assert worst(full_gradients(planned), expected["grads"])[0] < 1e-12

    run_ranks(2, body)


# -- what is asked for -------------------------------------------------------------------------------------------------


def test_overlap_in_a_plan_file():
    plan = parse_plan(
        """
schema_version: 1
defaults: {overlap: chunked}
tensor_parallel:
  layers.*:
    norm: replicate
    mlp: gather(overlap=off)
    mlp.{a,b}: colwise
    mlp.c: rowwise
  norm: replicate
"""
    )
    assert plan.options.overlap == "chunked"
    model, x = stack("as usual")
    models = [copy.deepcopy(model) for _ in range(2)]

    def body(rank: int) -> None:
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2), plan)
        planned(x)
        assert overlap_counts(planned, reset=True) == {"layers.0.mlp.c": (1, 1), "layers.1.mlp.c": (1, 1)}
        assert overlap_counts(planned) == {"layers.0.mlp.c": (0, 0), "layers.1.mlp.c": (0, 0)}
        assert "linear_all_reduce" in overlap_report(planned) and "asked for" in overlap_report(planned)
        over = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2), plan, overlap="off")
        assert overlap_report(over).startswith("no overlap")

    run_ranks(2, body)


@pytest.mark.parametrize("word", ["quick", "on", "true"])
def test_an_unknown_overlap(word):
    text = f"schema_version: 1\ndefaults: {{overlap: {word}}}\ntensor_parallel: {{layers: replicate}}"
    with pytest.raises(PlanError, match=r"auto, off, chunked, symm_mem|wrong-type"):
        parse_plan(text)


def test_overlap_that_cannot_be_is_an_error_before_anything_changes():
    def body(rank: int) -> None:
        mesh, model = build_mesh("cpu", tp=2), stack("as usual")[0]
        before = {name: id(p) for name, p in model.named_parameters()}
        only_norms = {"norm": "replicate"}
        linears = {"layers.*.mlp.a": "colwise(output=full)"}
        for words, plan, overlap in (
            ("no-symmetric-memory.*needs CUDA", STACK_PLAN, "symm_mem"),
            ("bad-option.*one of", STACK_PLAN, "fast"),
            ("no-overlap.*no linear to overlap", only_norms, "chunked"),
        ):
            with pytest.raises(ParallelizeError, match=f"(?s){words}"):
                parallelize_module(model, mesh, plan, overlap=overlap)
        with pytest.raises(
            PlanError, match=r"no-overlap.*DTensors pass between modules: layers\.0\.mlp: .*more than gather"
        ):
            styles = {"layers.0.mlp": PrepareModuleInput(), "layers.0.mlp.a": ColwiseParallel()}
            parallelize_module(model, mesh, styles, overlap="chunked")
        assert {name: id(p) for name, p in model.named_parameters()} == before
        parallelize_module(model, mesh, linears, overlap="chunked")  # its backward overlaps

    run_ranks(2, body)


def test_one_rank_has_nothing_to_overlap():
    model, x = stack("as usual")
    expected = model(x)

    def body(planned: nn.Module) -> None:
        assert torch.equal(planned(x), expected)

    on_ranks(model, body, ranks=1, sequence_parallel=True)


def test_a_given_profile_decides_and_is_kept():
    model, x = stack("as usual")
    models = [copy.deepcopy(model) for _ in range(2)]
    slow = LinkProfile(latency_us=100.0, bytes_per_s=1e12, flops=1e9, step_us=1e6, hidden={"chunked": 0.0})

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", tp=2)
        for profile, fused in ((slow, 0), (FAST, 1)):
            calibrate(mesh, torch.float64, profile)
            gc.collect()
            planned = parallelize_module(
                copy.deepcopy(models[rank]), mesh, STACK_PLAN, sequence_parallel=True, overlap="auto"
            )
            planned(x)
            assert set(overlap_counts(planned).values()) == {(1, fused)}
            assert "sequentially" in overlap_report(planned)

    run_ranks(2, body)


# -- after the plan: hooks, writes, late profiles ----------------------------------------------------------------------


def halve(module: nn.Module, args: tuple) -> None:
    with torch.no_grad():
        module.weight.mul_(0.5)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_a_weight_that_a_hook_changes_before_its_linear_runs(sequence_parallel):
    """The matmul ran with the old weight: its result is not used."""
    model, x = stack("as usual")
    halved = copy.deepcopy(model)
    halved.layers[0].mlp.a.register_forward_pre_hook(halve)
    with torch.no_grad():
        expected = halved(x)

    def body(planned: Any) -> None:
        planned.layers[0].mlp.a.register_forward_pre_hook(halve)
        with torch.no_grad():
            assert (planned(x) - expected).abs().max() < 1e-12

    on_ranks(model, body, sequence_parallel=sequence_parallel)


def test_training_a_block_that_writes_to_its_input():
    """No result is read, so none of what was saved for them is needed."""
    model, x = stack("writes to its input")
    expected = gradients(copy.deepcopy(model), x, 1)
    on_ranks(model, lambda planned: check_steps(planned, x, expected, 1), sequence_parallel=True)


def test_counts_and_misses_stay_true():
    """Auto that chose sync counts nothing as overlapped; a linear that is left alone stays so."""
    model, x = stack("derives another input")

    def body(planned: Any) -> None:
        for _ in range(6):
            planned(x)
        counts = overlap_counts(planned)
        assert all(0 <= fused <= calls == 6 for calls, fused in counts.values())
        assert counts["layers.0.mlp"] == (6, 0)
        assert planned.layers[0].mlp._applied.planned.overlap.misses == [3, 3]

    for profile in (replace(FAST, hidden={}), FAST):
        on_ranks(model, body, profile=profile, sequence_parallel=True, overlap="auto")


def test_a_profile_given_later_counts():
    model, x = stack("as usual")

    def body(planned: nn.Module) -> None:
        planned(x)
        assert set(overlap_counts(planned, reset=True).values()) == {(1, 0)}
        calibrate(build_mesh("cpu", tp=2), torch.float64, FAST)
        planned(x)
        assert set(overlap_counts(planned).values()) == {(1, 1)}

    on_ranks(model, body, profile=replace(FAST, hidden={}), sequence_parallel=True, overlap="auto")


def test_a_rule_that_asks_for_what_it_cannot_have():
    class Odd(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    def body(rank: int) -> None:
        model, _ = stack("as usual")
        for layer in model.layers:
            layer.mlp.a, layer.mlp.b = Odd(8, 12).double(), Odd(8, 12).double()
        plan = {
            "layers.*.mlp": "gather(overlap=chunked)",
            "layers.*.mlp.{a,b}": "colwise",
            "layers.*.mlp.c": "rowwise(overlap=chunked)",
        }
        with pytest.raises(ModelError, match=r"(?s)no-overlap.*layers\.0\.mlp asks for overlap=chunked"):
            parallelize_module(model, build_mesh("cpu", tp=2), plan)

    run_ranks(2, body)
