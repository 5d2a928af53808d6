"""Every decision is made once, in `plan/resolve.py`. Each test changes one of them there and sees every reader follow:
training, `describe_plan`, `explain`, `verify`, checkpoints."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from parallelize import ModelError, describe_plan, explain, load_plan, parallelize_model, recomputed, verify
from parallelize.base.mesh import MeshSpec
from parallelize.checkpoint.run.local_tensors import ModelOnMesh
from parallelize.plan import resolve as decisions
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.schema import Tie
from parallelize.state.records import applied, pipeline_cut, record_of
from parallelize.tools.analysis.record.shapes import fake_mesh
from tests.support.models import tiny_model


@contextmanager
def trained(mesh: str, family: str = "llama", **options: Any):
    """A model on the first rank of a mesh."""
    with fake_mesh(MeshSpec.parse(mesh)) as device_mesh:
        model = tiny_model(family, torch.float32)
        parallelize_model(model, device_mesh, **options)
        yield model, describe_plan(model)


def explained(mesh: str, family: str = "llama", **options: Any):
    return explain(ModelSource(family, lambda _: tiny_model(family)), None, mesh, sequence=16, **options)


def change(monkeypatch: pytest.MonkeyPatch, name: str, edit: Any) -> None:
    """Let `edit` change what the function of that name decides."""
    decide = getattr(decisions, name)
    monkeypatch.setattr(decisions, name, lambda *args, **keywords: edit(decide(*args, **keywords)))


@pytest.mark.sweep
def test_the_stages_of_a_pipeline(monkeypatch):
    def readers() -> list[Any]:
        with trained("pp=2") as (model, text):
            start = pipeline_cut(model).stages.starts[1]
            has_layer = "model.layers.0.mlp.up_proj.weight" in dict(model.named_parameters())
            stored = ModelOnMesh(model).writes("model.layers.0.mlp.up_proj.weight")
        return [start, has_layer, stored, "model.layers.0" in text.splitlines()[-1], explained("pp=2").ranks[0].units]

    before = readers()
    change(monkeypatch, "cut_stages", lambda stages: replace(stages, starts=tuple(s - (s > 0) for s in stages.starts)))
    after = readers()
    assert after[0] == before[0] - 1 and before[4] != after[4]
    assert before[1:4] == [True] * 3 and after[1:4] == [False] * 3
    assert verify("llama", None, "pp=2").ok


@pytest.mark.sweep
def test_whether_a_gradient_is_summed_over_tp(monkeypatch):
    def readers() -> list[Any]:
        options = {"sequence_parallel": True}
        with trained("tp=2", **options) as (model, text):
            summed = sum(row.partial for row in record_of(model).resolved.parameters.values())
        messages = [m for m in explained("tp=2", **options).ranks[0].messages if m.module == "pending reductions"]
        verified = verify("llama", None, "tp=2", loss_parallel=False, **options).ok
        return [summed, text.count("gradient summed"), len(messages), verified]

    def forget(rows: Any) -> Any:
        partial = {fqn: replace(row, partial=False) for fqn, row in rows.parameters.items()}
        return replace(rows, parameters=partial)

    before = readers()
    change(monkeypatch, "tensor_rows", forget)
    assert before[0] > 0 and before[1:] == [before[1], 1, True] and before[1] > 0
    assert readers() == [0, 0, 0, False]


@pytest.mark.sweep
def test_the_units_of_zero_3(monkeypatch):
    def readers() -> list[Any]:
        with trained("dp=2", zero=3) as (model, text):
            wrapped = {name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)}
        gathered = {m.module for m in explained("dp=2", zero=3).ranks[0].messages if m.op == "all_gather" and m.module}
        return [wrapped, gathered - {"loss"}, "layers.*.mlp" in text.splitlines()[-1]]

    wrapped, gathered, named = readers()
    assert wrapped == {"model.layers.0", "model.layers.1"} and gathered == {"model.layers.*"} and not named
    change(monkeypatch, "zero_units", lambda units: tuple(f"{unit}.mlp" for unit in units))
    wrapped, gathered, named = readers()
    assert wrapped == {"model.layers.0.mlp", "model.layers.1.mlp"} and gathered == {"model.layers.*.mlp"} and named
    assert verify("llama", None, "dp=2", zero=3).ok


@pytest.mark.sweep
def test_the_units_that_are_recomputed(monkeypatch):
    def readers() -> list[Any]:
        with trained("dp=1", recompute="full") as (model, text):
            names = sorted(recomputed(model))
        memory = explained("dp=1", recompute="full").ranks[0].memory
        return [names, "recompute full: model.layers.*.mlp" in text, memory.activations]

    names, in_text, peak = readers()
    assert names == ["model.layers.0", "model.layers.1"] and not in_text
    change(monkeypatch, "recompute_units", lambda units: tuple(f"{unit}.mlp" for unit in units))
    names_after, in_text, peak_after = readers()
    assert names_after == ["model.layers.0.mlp", "model.layers.1.mlp"] and in_text and peak_after > peak
    assert verify("llama", None, "dp=1", recompute="full").ok


@pytest.mark.sweep
def test_the_kind_of_attention_over_cp(monkeypatch):
    def readers() -> list[Any]:
        with trained("cp=2") as (model, text):
            return [applied(model).context.is_causal, "self_attn causal" in text]

    assert readers() == [True, True] and explained("cp=2").ranks[0].flops > 0
    change(monkeypatch, "attention_kinds", lambda kinds: dict.fromkeys(kinds, "bidirectional"))
    assert readers() == [False, False]
    with pytest.raises(ModelError, match="is causal, and the plan says that it is bidirectional"):
        explained("cp=2")
    assert not verify("llama", None, "cp=2").ok


@pytest.mark.sweep
def test_ties_that_a_plan_declares_are_explained():
    tie = Tie("scales", ("model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"))
    source = ModelSource("llama", lambda _: tiny_model("llama"))
    for mesh, count in (("pp=2", 1), ("dp=2", 0)):
        plan = replace(load_plan("llama"), ties=(tie,))
        messages = explain(source, plan, mesh, sequence=16).ranks[0].messages
        assert sum(message.module.startswith("tie of") for message in messages) == count


@pytest.mark.sweep
def test_ties_over_stages(monkeypatch):
    def readers() -> list[Any]:
        with trained("pp=2", "gpt2") as (model, text):
            has_ties = applied(model).ties is not None
        tied = [m for m in explained("pp=2", "gpt2").ranks[0].messages if m.module.startswith("tie of")]
        return [has_ties, len(tied), "tie " in text, verify("gpt2", None, "pp=2").ok]

    assert readers() == [True, 1, True, True]
    change(monkeypatch, "tied_parameters", lambda ties: ())
    assert readers() == [False, 0, False, False]
