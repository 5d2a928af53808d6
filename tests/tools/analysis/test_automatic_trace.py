"""`parallelize_module`, `parallelize_model` and `verify` follow a plan through the forward first, where that is
quick."""

from __future__ import annotations

import logging
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import ModelError, PlanError, build_mesh, parallelize_model, parallelize_module, verify
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.resolve import resolve
from parallelize.tools.analysis import automatic_trace
from parallelize.tools.analysis.automatic_trace import check_by_trace
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

PLAN = parse_plan("schema_version: 1\ntensor_parallel: {embed: embedding, up: colwise, down: rowwise}", "mine.yaml")


class Gated(nn.Module):
    """Ids, a column linear, an operation, a row linear."""

    def __init__(self, operation=F.relu):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(20, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.operation = operation

    def forward(self, ids):
        return self.down(self.operation(self.up(self.embed(ids))))


def softmax(x):
    return F.softmax(x, -1)


@pytest.fixture(autouse=True)
def _traces(monkeypatch):
    monkeypatch.delenv(automatic_trace.VARIABLE, raising=False)
    monkeypatch.setattr(automatic_trace, "_traced_before", {})


@pytest.mark.parametrize("call", [parallelize_module, parallelize_model])
def test_a_mistake_is_refused_on_every_rank_before_anything_is_changed(call):
    def body(rank: int) -> tuple[str, bool]:
        model = Gated(softmax)
        with pytest.raises(PlanError) as error:
            call(model, build_mesh("cpu", tp=2), PLAN)
        return str(error.value), isinstance(model.up.weight, nn.Parameter) and "forward" not in vars(model.up)

    line = softmax.__code__.co_firstlineno + 1
    for message, unchanged in run_ranks(2, body):
        assert (
            f"mine.yaml:2:37: mixed-features: up.weight: softmax in the model (test_automatic_trace.py:{line})"
            in message
        )
        assert unchanged


def test_it_can_be_turned_off(monkeypatch):
    def run(**options) -> list:
        return run_ranks(2, lambda rank: parallelize_module(Gated(softmax), build_mesh("cpu", tp=2), PLAN, **options))

    assert run(trace=False)
    monkeypatch.setenv(automatic_trace.VARIABLE, "off")
    assert run()
    with pytest.raises(PlanError, match="mixed-features"):
        run(trace=True)


@pytest.mark.sweep
def test_a_plan_is_traced_once_for_each_class_and_config(monkeypatch):
    traced: list[str] = []
    trace_copy = automatic_trace.trace_copy
    monkeypatch.setattr(automatic_trace, "trace_copy", lambda *args: traced.append("") or trace_copy(*args))
    for model in (Gated(), Gated(), tiny_model("llama"), tiny_model("llama"), tiny_model("llama", rope_theta=5e5)):
        plan = PLAN if isinstance(model, Gated) else None
        run_ranks(2, lambda rank, model=model, plan=plan: check(model, plan))
    assert len(traced) == 3


def resolved_of(model: nn.Module, plan=PLAN, **options):
    from parallelize.plan.choose import choose_plan

    return resolve(plan or choose_plan(model)[0], describe(model), MeshSpec(tp=2), Options(**options))


def check(model: nn.Module, plan=PLAN, trace: bool | None = None) -> None:
    check_by_trace(model, resolved_of(model, plan), trace)


def test_the_caller_is_left_alone():
    """Neither random numbers, nor hooks, nor attributes of the model notice the trace."""

    def counted(x):
        model.calls = model.calls + 1
        return x + torch.rand(()) + random.random()

    model = Gated(counted)
    model.calls = 0
    model.up.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    state, own = torch.get_rng_state(), random.getstate()
    check(model.eval(), trace=True)
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == own
    assert (
        not model.training
        and model.up.weight.device.type == "cpu"
        and list(vars(model.up)) == list(vars(nn.Linear(1, 1)))
    )


def test_ranks_that_are_seeded_apart_trace_the_same_layers():
    """A layer may be left out at random."""
    draws: list[tuple[float, float]] = []

    def drawing(x):
        draws.append((float(torch.rand((), device="cpu")), random.random()))
        return F.relu(x)

    model = Gated(drawing)
    for seed in range(2):
        torch.manual_seed(seed)
        random.seed(seed)
        automatic_trace._traced_before.clear()
        check(model, trace=True)
    assert len(draws) == 2 and draws[0] == draws[1]


class TwoInputs(Gated):
    def forward(self, ids, scale):
        return super().forward(ids) * scale


def large(monkeypatch) -> nn.Module:
    monkeypatch.setattr(automatic_trace, "MAX_MODULES", 3)
    return Gated(softmax)


def slow(monkeypatch) -> nn.Module:
    monkeypatch.setattr(automatic_trace, "SECONDS", 0.0)
    return Gated(softmax)


UNTRACED = {
    "inputs": (lambda _: TwoInputs(softmax), "missing 1 required positional argument: 'scale'"),
    "values": (lambda _: Gated(lambda x: x[x > 0]), "unimplemented"),
    "modules": (large, "it has 4 modules, more than 3"),
    "seconds": (slow, "TimeoutError"),
}


@pytest.mark.parametrize("name", UNTRACED)
def test_what_cannot_be_traced_is_left_out(name, monkeypatch, caplog):
    make, reason = UNTRACED[name]
    caplog.set_level(logging.DEBUG, "parallelize")
    check(make(monkeypatch))
    assert "is not traced" in caplog.text and reason in caplog.text
    if name in ("inputs", "values"):
        with pytest.raises(ModelError, match="untraceable-model") as error:
            check(make(monkeypatch), trace=True)
        assert reason in str(error.value)


def build() -> dict:
    return {"model": Gated(softmax), "inputs": lambda batch, sequence: {"ids": torch.randint(0, 20, (batch, sequence))}}


def test_verify_names_the_operation_or_compares_the_numbers():
    options = {"loss": lambda out, targets: out.sum(), "count": lambda targets: 1}
    source = lambda: {**build(), **options}  # noqa: E731
    with pytest.raises(PlanError, match="mixed-features"):
        verify(source, PLAN, "tp=2")
    assert not verify(source, PLAN, "tp=2", trace=False).ok
