"""The names of tied parameters, on one rank and over pipeline stages."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallelize import build_mesh, parallelize_model, parallelize_module, shard_info, tied_names
from parallelize.state.stored_slices import _joined
from parallelize.tools.verification.threads import run_ranks
from tests.support.models import tiny_model

PAIR = ("model.embed_tokens.weight", "lm_head.weight")


def test_ties_of_a_model_before_and_after_the_plan():
    base = tiny_model("llama", tie_word_embeddings=True)
    assert tied_names(base) == (PAIR,)
    assert tied_names(tiny_model("llama")) == ()

    def body(rank: int) -> None:
        model = parallelize_module(copy.deepcopy(base), build_mesh("cpu", tp=2))
        assert tied_names(model) == (PAIR,)
        info = shard_info(model)
        assert info[PAIR[0]].names == info[PAIR[1]].names == PAIR
        assert info["model.norm.weight"].names == ("model.norm.weight",)

    run_ranks(2, body)


def test_ties_over_pipeline_stages_are_known_on_every_rank():
    base = tiny_model("llama", num_hidden_layers=2, tie_word_embeddings=True)

    def body(rank: int) -> None:
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", pp=2, tp=2))
        assert tied_names(parallel.module) == (PAIR,)
        infos = shard_info(parallel.module)
        assert infos[PAIR[0]].names == infos[PAIR[1]].names == PAIR
        assert [infos[name].ranks for name in PAIR] == [(0, 1), (2, 3)]

    run_ranks(4, body)


def test_ties_of_plain_modules_and_reused_ones():
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False), "c": nn.Linear(4, 4)})
    model["d"] = model["c"]
    model["b"].weight = model["a"].weight
    assert tied_names(model) == (("a.weight", "b.weight"), ("c.weight", "d.weight"), ("c.bias", "d.bias"))
    model["b"].weight = nn.Parameter(torch.zeros(4, 4))
    assert tied_names(model) == (("c.weight", "d.weight"), ("c.bias", "d.bias"))


@pytest.mark.parametrize("members", [("a.weight", "c.weight"), ("c.weight", "b.weight")])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_tie_of_the_plan_adds_to_a_parameter_that_modules_share(monkeypatch, members, is_cut):
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    model["b"].weight = model["a"].weight
    names = {"a.weight": ("a.weight", "b.weight"), "c.weight": ("c.weight",)}
    facts = {name: SimpleNamespace(fqn=name, names=shared) for name, shared in names.items()}
    tie = SimpleNamespace(members=members)
    resolved = SimpleNamespace(facts=SimpleNamespace(parameters=facts), ties=(tie,))
    found = {
        "pipeline_cut": None,
        "record_of": None,
        "pipeline_cut" if is_cut else "record_of": SimpleNamespace(resolved=resolved),
    }
    for name, value in found.items():
        monkeypatch.setattr(f"parallelize.state.stored_slices.{name}", lambda module, value=value: value)
    assert tied_names(model) == (("a.weight", "b.weight", "c.weight"),)


def test_groups_that_overlap_are_one():
    groups = [("a", "b"), ("c",), ("d", "e"), ("a", "c"), ("f",)]
    assert list(_joined(groups)) == [("a", "b", "c"), ("d", "e"), ("f",)]
    assert list(_joined([("a", "b"), ("c", "b")])) == [("a", "b", "c")]
