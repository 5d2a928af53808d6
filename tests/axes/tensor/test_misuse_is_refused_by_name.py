"""Mistakes in plans, meshes and calls are errors with a name and a fix."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from parallelize import (
    MeshError,
    ModelError,
    ParallelizeError,
    PlanError,
    ShapeError,
    build_mesh,
    cross_entropy,
    load_plan,
    parallelize_module,
)
from parallelize.base.mesh import MeshSpec
from parallelize.plan.model_facts import describe
from parallelize.plan.resolve import resolve
from parallelize.plan.styles.notation import parse_style
from tests.axes.tensor.planned_pairs import planned
from tests.axes.tensor.test_hot_path import BOTH, pair, step
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks


def test_ids_and_targets_beyond_the_vocabulary_are_refused():
    _, models = pair("llama")

    def body(rank):
        net = planned(models, rank)
        with pytest.raises(ShapeError) as error:
            net(input_ids=torch.tensor([[1, 67]]))
        assert error.value.slugs == ("id-out-of-range",)
        ids, labels = tiny_batch()
        with pytest.raises(ShapeError):
            cross_entropy(net(input_ids=ids).logits, labels.clamp(min=0) + 60)

    run_ranks(2, body)


def test_a_block_outside_the_region_is_refused():
    _, models = pair("llama")

    def body(rank):
        net = planned(models, rank)
        for _ in range(2):
            with pytest.raises(ModelError) as error:
                net.model.layers[0].mlp(torch.randn(2, 9, 48, dtype=torch.float64))
            assert error.value.slugs == ("outside-region",)
            step(net)

    run_ranks(2, body)


def test_what_cannot_be_planned_is_refused_by_name():
    attention = nn.MultiheadAttention(8, 2)
    with pytest.raises(ParallelizeError) as error:
        run_ranks(1, lambda rank: parallelize_module(attention, build_mesh("cpu", tp=1), {"out_proj": "rowwise"}))
    assert set(error.value.slugs) == {"reads-child-parameters"}
    _, models = pair("llama")

    def body(rank):
        net = planned(models, rank)
        for again, plan in ((net, None), (nn.ModuleDict({"model": net.model}), {"model.norm": "replicate"})):
            with pytest.raises(ParallelizeError) as error:
                parallelize_module(again, build_mesh("cpu", tp=2), plan)
            assert error.value.slugs[0] == "already-parallelized"
        with pytest.raises(ModelError, match="other-data-parallel"):
            nn.parallel.DistributedDataParallel(net)
        with pytest.raises(ModelError, match="attentions-are-shards"):
            net(input_ids=tiny_batch()[0], output_attentions=True)
        with pytest.raises(ModelError, match=r"hidden-states-are-shards: .* of one token"):
            net(input_ids=tiny_batch()[0][:, :1], output_hidden_states=True)

    run_ranks(2, body)


def with_style(plan, pattern, style):
    assert any(rule.pattern == pattern for rule in plan.rules)
    return replace(
        plan,
        rules=tuple(replace(r, style=parse_style(style)) if r.pattern == pattern else r for r in plan.rules),
    ).with_options(**BOTH)


def slugs(plan, model=None) -> tuple[str, ...]:
    with pytest.raises(PlanError) as error:
        resolve(plan, describe(model or tiny_model("llama")), MeshSpec(tp=2))
    return error.value.slugs


@pytest.mark.parametrize("pattern", ["model.layers.*.input_layernorm", "model.norm"])
def test_a_replicated_norm_inside_the_region_is_refused(pattern):
    assert slugs(with_style(load_plan("llama"), pattern, "replicate")) == ("replicated-in-region",)


def test_loss_parallelism_needs_a_head_that_keeps_its_shard():
    assert slugs(with_style(load_plan("llama"), "lm_head", "colwise")) == ("no-vocabulary-output",)


def test_the_plan_of_another_model_is_one_problem():
    with pytest.raises(PlanError) as error:
        resolve(load_plan("gpt2"), describe(tiny_model("llama")), MeshSpec(tp=2))
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


def test_invalid_meshes_are_refused():
    for mesh in (None, "llama"):
        with pytest.raises(MeshError) as error:
            parallelize_module(tiny_model("llama"), mesh)
        assert error.value.slugs == ("no-mesh",)
    for make, slug in ((lambda: build_mesh("cpuu", tp=2), "no-device"), (lambda: build_mesh("cpu"), "no-axes")):
        with pytest.raises(MeshError) as error:
            make()
        assert error.value.slugs == (slug,)
