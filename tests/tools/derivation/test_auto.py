"""`plan="auto"`: a model that no plan is for trains as the unsharded one, by one plan on all ranks."""

from __future__ import annotations

import logging

import pytest
import torch

from parallelize import build_on_meta, parallelize_module, verify
from parallelize.base.errors import ModelError
from parallelize.plan.choose import plan_of
from parallelize.plan.models.model_source import source_of
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.derivation import auto
from parallelize.tools.derivation.proof import Proof
from parallelize.tools.derivation.small_model import small_model
from tests.support.models import tiny_model
from tests.support.refused import Block, refused, small_mesh
from tests.tools.derivation import auto_jobs as jobs
from tests.tools.derivation.own_models import TinyGpt


@pytest.mark.on_cpus("a derivation runs the model's forward there")
@pytest.mark.parametrize("maker", ["own_model", pytest.param("own_type", marks=pytest.mark.sweep)])
def test_a_model_without_a_plan_trains_as_the_unsharded_one(maker, two_processes):
    first, second = two_processes.run(jobs.trained, maker)
    for result in (first, second):
        assert result["output"] < 1e-12 and result["gradients"] < 1e-12
        assert result["names"][0] == result["names"][1] and result["generator"]
    assert first["sharded"] == second["sharded"] and len(first["sharded"]) > 5
    assert len(first["lines"]) == 1 and "proven on tp=2" in first["lines"][0] and second["lines"] == []


def test_nothing_is_derived_where_nothing_is_sharded(two_processes):
    two_processes.run(jobs.on_data_ranks)


def test_a_model_with_a_plan_keeps_it(monkeypatch):
    monkeypatch.setattr(auto, "derived_plan", lambda model, tp: pytest.fail("it was derived"))
    assert plan_of(tiny_model("llama"), "auto").name == "llama"


def test_a_model_without_values_gets_the_plan_of_one_with_values():
    model = build_on_meta(TinyGpt)
    assert plan_of(model, "auto").rules == plan_of(TinyGpt(), "auto").rules
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.device("meta"):
        large = torch.nn.Linear(1 << 15, 1 << 15)
    with refused(ModelError, "too-large-to-run", "a function that returns the model with smaller sizes"):
        plan_of(large, "auto")


def test_the_plan_of_a_plain_module(caplog):
    model, before = TinyGpt(), torch.get_rng_state()
    with caplog.at_level(logging.INFO, "parallelize"):
        plan = plan_of(model, "auto")
    assert plan.classes == ("TinyGpt",) and plan.regions
    assert torch.equal(torch.get_rng_state(), before)
    (notice,) = (record.getMessage() for record in caplog.records)
    assert notice.startswith("plan TinyGpt, derived from TinyGpt: proven on tp=2")


@pytest.mark.parametrize(("ranks", "proven"), [(4, 4), (16, 8)])
def test_a_module_of_ones_own_is_proven_on_as_many_ranks(monkeypatch, ranks, proven):
    """So that what they do not divide is left whole, or stored by several ranks, and is not refused later."""

    class DerivationError(Exception):
        pass

    def derive(source, tp):
        raise DerivationError(tp)

    monkeypatch.setattr(auto, "derive_plan", derive)
    with small_mesh(tp=ranks) as mesh, pytest.raises(DerivationError, match=f"^{proven}$"):
        parallelize_module(TinyGpt(), mesh, "auto")
    with pytest.raises(DerivationError, match=f"^{proven}$"):
        verify(TinyGpt(), "auto", f"tp={ranks}")


def test_a_model_that_cannot_be_derived_is_left_alone():
    model = Block()
    with small_mesh(tp=2) as mesh, refused(ModelError, "unknown-inputs", "Block"):
        parallelize_module(model, mesh, "auto")
    assert type(model.up.weight.data) is torch.Tensor


@pytest.mark.sweep
def test_a_derived_plan_can_be_verified_by_its_name():
    assert verify("biogpt", "auto", "tp=2", sequence_parallel=False, loss_parallel=False).ok


# -- plans that shard little -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "warns"), [("*", False), ("0", True)])
def test_a_plan_that_leaves_most_of_a_model_whole_says_so(caplog, layers, warns):
    text = (
        f"schema_version: 1\ntensor_parallel: {{transformer.h.{layers}.mlp.up: colwise, "
        f"transformer.h.{layers}.mlp.down: rowwise, "
    )
    plan = parse_plan(text + '"**": replicate}', "a test", name="mlps")
    with caplog.at_level(logging.WARNING, "parallelize"):
        auto.say_share(TinyGpt(), plan, 2)
    texts = [record.getMessage() for record in caplog.records]
    assert bool(texts) == warns
    assert not warns or (texts[0].startswith("plan mlps leaves 70%") and "whole on each of 2 ranks" in texts[0])


@pytest.mark.sweep
def test_a_plan_of_transformers_that_shards_little_is_derived():
    _, model = small_model(source_of("afmoe"), 2)
    plan = plan_of(model, "auto")
    assert plan.source == "derived plan" and auto._share(model, plan, 2) > 0.7
    assert plan_of(model, None).source == "base_model_tp_plan"  # which shards 0.39


@pytest.mark.sweep
@pytest.mark.parametrize("holds", [True, False])
def test_a_plan_of_transformers_that_is_not_proven_is_derived(monkeypatch, holds):
    if not holds:
        monkeypatch.setattr(auto, "prove", lambda source, plan, tp: Proof(False, "it differs"))
    _, model = small_model(source_of("laguna"), 2)
    assert plan_of(model, "auto").source == ("base_model_tp_plan" if holds else "derived plan")
