"""Orders of experts over ranks: which experts a rank has, by which numbers, and what is no order."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelize.base.errors import ModelError, PlanError
from parallelize.base.layout import repeated
from parallelize.base.mesh import MeshSpec
from parallelize.plan.expert_order import new_numbers, on_ranks, order_of, orders_of
from parallelize.plan.model_facts import describe
from parallelize.plan.options import Options
from parallelize.plan.plan_file import load_plan
from parallelize.plan.resolve import resolve
from tests.support.models import tiny_model

NAME = "model.layers.0.mlp.experts"


@given(st.permutations(list(range(9))), st.integers(1, 9))
def test_numbers_are_those_of_what_ranks_store(order, ep):
    ranks = on_ranks(tuple(order), ep)
    numbers = new_numbers(tuple(order), ep)
    assert sorted(numbers) == list(range(9))
    first = 0
    for rank, experts in enumerate(ranks):
        assert list(experts) == sorted(order[rank * 9 // ep : (rank + 1) * 9 // ep])
        assert [numbers[expert] for expert in experts] == list(range(first, first + len(experts)))
        first += len(experts)


def test_a_layout_has_the_experts_of_the_order():
    layout = repeated((6, 5), 0, 4, 2, units=on_ranks((4, 1, 3, 0, 2, 5), 2))
    assert layout.owned == (((1, 2), (3, 5)), ((0, 1), (2, 3), (5, 6))) * 2
    in_rows = repeated((12, 5), 0, 2, 2, 2, 1, on_ranks((4, 1, 3, 0, 2, 5), 2))  # two rows for each expert
    assert in_rows.owned == (((2, 4), (6, 10)), ((0, 2), (4, 6), (10, 12)))
    assert repeated((6, 5), 0, 2, 2, units=on_ranks(tuple(range(6)), 2)) == repeated((6, 5), 0, 2, 2)


def test_names_are_found_where_peft_wraps():
    orders = (("model.layers.*.mlp.experts", (1, 0)),)
    for name in (NAME, f"{NAME}.gate_up_proj", f"base_model.model.{NAME}.base_layer.down_proj"):
        assert order_of(orders, name) == (1, 0), name
    assert order_of(orders, "model.layers.0.mlp.gate") is None and order_of(None, NAME) is None


def test_a_file_is_read(tmp_path):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({NAME: [2, 0, 1]}))
    options = Options(expert_placement=path)
    assert options.expert_placement == ((NAME, (2, 0, 1)),)
    assert options == Options(expert_placement={NAME: [2, 0, 1]})
    hash(options)
    assert options.over(Options(ep=2)).expert_placement == options.expert_placement


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("/no/such/file.json", "cannot be read"),
        ({NAME: [0, 0, 1]}, "each of its 3 experts once"),
        ({NAME: []}, "0 experts"),
        ({NAME: [0, 1.0]}, "2 experts once"),
        ([1, 2], "no mapping"),
        (3, "no mapping"),
    ],
    ids=str,
)
def test_what_is_no_order(value, words):
    with pytest.raises(ModelError, match=words) as caught:
        Options(expert_placement=value)
    assert caught.value.slugs == ("bad-placement",)
    assert orders_of(value)[1] is not None


@pytest.mark.parametrize(
    ("placement", "words"),
    [({"model.layers.9.mlp.experts": range(6)}, "names no experts"), ({NAME: range(5)}, "5 experts, and .* has 6")],
    ids=["name", "number"],
)
def test_orders_of_another_model(placement, words):
    model = describe(tiny_model("qwen3_moe", mlp_only_layers=[]))
    options = Options(ep=2, expert_placement={name: [*order] for name, order in placement.items()})
    with pytest.raises(PlanError, match=words) as caught:
        resolve(load_plan("mixtral"), model, MeshSpec(tp=2), options)
    assert caught.value.slugs == ("bad-placement",)


@pytest.mark.parametrize("options", [{}, {"ep": 2, "etp": 2}], ids=str)
def test_no_rank_has_whole_experts(options):
    placed = Options(**options, expert_placement={NAME: [1, 0]}).complete()
    assert "bad-placement" in [problem.slug for problem in placed.check_on(MeshSpec(dp=2, tp=2))]
