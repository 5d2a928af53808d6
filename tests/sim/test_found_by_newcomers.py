"""What a first-time user ran into: silent mistakes that are errors now, and messages that say what to do."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from parallelize import (
    MeshError,
    ModelError,
    PlanError,
    build_mesh,
    full_state_dict,
    load_plan,
    parallelize_module,
)
from parallelize.plan.model import describe
from parallelize.plan.resolve import resolve
from parallelize.styles.text import parse_style
from tests.sim.test_hot_path import BOTH, pair
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks


def with_style(plan, pattern, style):
    assert any(rule.pattern == pattern for rule in plan.rules)
    return replace(
        plan,
        rules=tuple(replace(r, style=parse_style(style)) if r.pattern == pattern else r for r in plan.rules),
    ).with_options(**BOTH)


def slugs(plan, model=None) -> tuple[str, ...]:
    with pytest.raises(PlanError) as error:
        resolve(plan, describe(model or tiny_model("llama")), 2)
    return error.value.slugs


@pytest.mark.parametrize("pattern", ["model.layers.*.input_layernorm", "model.norm"])
def test_a_replicated_norm_inside_the_region_is_refused(pattern):
    assert slugs(with_style(load_plan("llama"), pattern, "replicate")) == ("replicated-in-region",)


def test_loss_parallelism_needs_a_head_that_keeps_its_shard():
    assert slugs(with_style(load_plan("llama"), "lm_head", "colwise")) == ("no-vocabulary-output",)


def test_the_plan_of_another_model_is_told_in_one_line():
    with pytest.raises(PlanError) as error:
        resolve(load_plan("gpt2"), describe(tiny_model("llama")), 2)
    assert error.value.slugs == ("wrong-plan",)
    assert "serves" in str(error.value) and "LlamaForCausalLM" in str(error.value)


def test_a_forgotten_local_attribute_is_explained():
    model = tiny_model("opt")
    models = [copy.deepcopy(model) for _ in range(2)]
    plan = replace(load_plan("opt"), local=())

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), plan)
        with pytest.raises(ModelError) as error:
            models[rank](input_ids=tiny_batch()[0])
        assert error.value.slugs == ("shard-misread",)
        assert "num_heads = 8" in str(error.value) and "local:" in str(error.value)

    run_ranks(2, body)


def test_the_tutorial_flatten_works_on_sharded_logits():
    model, models = pair("llama")
    ids, labels = tiny_batch()
    want = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), **BOTH)
        logits = models[rank](input_ids=ids).logits
        with pytest.raises(ModelError):
            logits.flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).detach()

    for got in run_ranks(2, body):
        assert abs(got - want) < 1e-12


@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_one_whole_state_dict(family):
    model, models = pair(family)
    want = model.state_dict()

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), **BOTH)
        return full_state_dict(models[rank])

    first, second = run_ranks(2, body)
    assert second == {} and first.keys() == want.keys()
    assert all(torch.equal(first[name], value) for name, value in want.items())
    copy.deepcopy(model).load_state_dict(first)


def test_meshes_that_are_none():
    for mesh in (None, "llama"):
        with pytest.raises(MeshError) as error:
            parallelize_module(tiny_model("llama"), mesh)
        assert error.value.slugs == ("no-mesh",)
    for make, slug in ((lambda: build_mesh("cpuu", tp=2), "no-device"), (lambda: build_mesh("cpu"), "no-axes")):
        with pytest.raises(MeshError) as error:
            make()
        assert error.value.slugs == (slug,)
