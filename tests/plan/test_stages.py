"""Splitting a model into stages: arithmetic on names and counts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parallelize import PlanError, load_plan
from parallelize.plan.model_facts import describe
from parallelize.plan.schema import Cuts, Plan
from parallelize.plan.stages import cut_stages, split_evenly


def model(widths: list[int]) -> nn.Module:
    root = nn.Module()
    root.embed = nn.Embedding(7, 4)
    root.layers = nn.ModuleList(nn.Linear(4, width) for width in widths)
    root.norm, root.head = nn.LayerNorm(4), nn.Linear(4, 7)
    return root


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.integers(1, 8))
def test_split_evenly_is_best(costs, parts):
    parts = min(parts, len(costs))
    starts = split_evenly(costs, parts)
    assert starts[0] == 0 and list(starts) == sorted(set(starts)) and len(starts) == parts

    def worst(starts):
        bounds = [*starts, len(costs)]
        return max(sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds))

    best = min(worst((0, *rest)) for rest in itertools.combinations(range(1, len(costs)), parts - 1))
    assert worst(starts) == pytest.approx(best)


def test_balanced_by_parameters_and_by_costs():
    facts = describe(model([4, 4, 4, 400]))
    # the wide layer is in one stage with the modules after the layers
    assert cut_stages(None, facts, 2).bounds(0) == (
        0,
        4,
    )
    costs = {"embed": 0, "layers.0": 9, "layers.*": 1, "norm": 0, "head": 0}
    assert cut_stages(None, facts, 2, costs=costs).bounds(0) == (0, 2)
    assert cut_stages(None, facts, 4).starts == (0, 2, 3, 4)


def test_modules_around_the_layers_are_in_the_first_and_the_last_stage():
    stages = cut_stages(None, describe(model([4, 4])), 2)
    assert stages.units == ("embed", "layers.0", "layers.1", "norm", "head")
    assert stages.stage_of("embed.weight") == 0 and stages.stage_of("norm") == 1 and stages.stage_of("head.bias") == 1


def test_a_plan_need_not_name_the_layers(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("schema_version: 1\ntensor_parallel: {'**?': replicate}\npipeline: {carry: [x, bias]}\n")
    plan = load_plan(str(path))
    stages = cut_stages(plan, describe(model([4, 4])), 2)
    assert stages.cuts.layers == "layers" and stages.cuts.carry == ("x", "bias")
    assert stages.units == ("embed", "layers.0", "layers.1", "norm", "head")


def test_shipped_plans_split_every_model():
    from tests.support.models import FAMILIES, tiny_model

    for family in FAMILIES:
        facts = describe(tiny_model(family, num_hidden_layers=4))
        plan = load_plan(family)
        stages = cut_stages(plan, facts, 4)
        assert stages.num_stages == 4, family
        assert stages.stage_of(plan.layers_region.layers + ".2") == 2


MISTAKES = [
    ({"num_stages": 5}, "more-stages-than-layers"),
    ({"num_stages": 2, "costs": {"layers.*": 1}}, "bad-costs"),
    ({"num_stages": 2, "costs": [1, 2]}, "bad-costs"),
    ({"num_stages": 2, "assignment": [["embed", "layers"], ["norm"]]}, "unassigned-parameter"),
    ({"num_stages": 2, "assignment": [["embed", "layerz"], ["norm"]]}, "unknown-module"),
    ({"num_stages": 2, "assignment": [["embed", "layers", "layers.0"], ["norm", "head"]]}, "repeated-module"),
    ({"num_stages": 2, "assignment": [["embed", "layers", "norm", "head"]]}, "more-stages-than-layers"),
    ({"num_stages": 2, "plan": Plan("p", (), cuts=Cuts("layer"))}, "no-layers"),
    ({"num_stages": 2, "plan": Plan("p", (), cuts=Cuts("layers", every=("norm",)))}, "every-has-parameters"),
    ({"num_stages": 2, "plan": Plan("p", (), cuts=Cuts("layers", skips=(("embed", "tail"),)))}, "unknown-skip"),
]


@pytest.mark.parametrize(("options", "slug"), MISTAKES, ids=[slug for _, slug in MISTAKES])
def test_mistakes(options, slug):
    options = dict(options)
    plan = options.pop("plan", None)
    with pytest.raises(PlanError) as error:
        cut_stages(plan, describe(model([4, 4, 4, 4])), options.pop("num_stages"), **options)
    assert slug in error.value.slugs


def test_a_model_without_layers():
    with pytest.raises(PlanError, match="no-layers"):
        cut_stages(None, describe(nn.Linear(2, 2)), 2)
