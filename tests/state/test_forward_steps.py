"""The steps around a module's own forward: one order, whichever is installed first."""

import copy
import inspect
from itertools import permutations
from types import MethodType

import pytest
import torch
from torch import nn

from parallelize import ModelError, describe_plan, parallelize_model
from parallelize.base.mesh import MeshSpec
from parallelize.state.forward_steps import (
    DROPOUT,
    EXPERTS,
    PLANNED,
    RECOMPUTED,
    STAGE,
    add_step,
    describe_steps,
    has_inner,
    own_forward,
    restored_forwards,
    run_inner,
)
from parallelize.tools.analysis.record.shapes import fake_mesh
from tests.support.models import tiny_model

ORDER = [DROPOUT, RECOMPUTED, PLANNED, EXPERTS]


class Own(nn.Module):
    def forward(self, calls: list, by: int = 2) -> int:
        calls.append("own")
        return by


def step(place: str):
    def function(self, *args, **kwargs):
        args[0].append(place)
        return 10 * run_inner(self, place, args, kwargs)

    return function


def calls_of(module: nn.Module, expected: int) -> list:
    calls: list = []
    assert module(calls) == expected
    return calls


@pytest.mark.parametrize("installed", list(permutations(ORDER, 3)), ids=" ".join)
def test_one_order_whichever_is_installed_first(installed):
    module = Own()
    for place in installed:
        add_step(module, place, step(place))
    assert calls_of(module, 2000) == [*(place for place in ORDER if place in installed), "own"]
    assert [place for place, _ in describe_steps(module)] == calls_of(module, 2000)


def test_a_step_takes_the_place_of_an_earlier_one():
    module = Own()
    for place in (PLANNED, STAGE, PLANNED):
        add_step(module, place, step(place))
    assert calls_of(module, 200) == [STAGE, PLANNED, "own"]


def test_a_forward_that_others_set_stays_where_it_was_set():
    module = Own()
    add_step(module, PLANNED, step(PLANNED))
    add_step(module, RECOMPUTED, step(RECOMPUTED))
    earlier = module.forward

    def foreign(self, calls):
        calls.append("foreign")
        return earlier(calls)

    module.forward = MethodType(foreign, module)
    add_step(module, DROPOUT, step(DROPOUT))
    add_step(module, EXPERTS, step(EXPERTS))  # inside of what the other forward calls
    assert calls_of(module, 20_000) == [DROPOUT, "foreign", RECOMPUTED, PLANNED, EXPERTS, "own"]
    assert [place for place, _ in describe_steps(module)][1] == "instance"


def test_a_forward_of_the_instance_is_inside_of_all_steps_and_has_their_signature():
    module = Own()
    module.forward = lambda calls, other=3: calls.append("instance") or other
    assert has_inner(module, PLANNED)
    add_step(module, PLANNED, step(PLANNED))
    assert calls_of(module, 30) == [PLANNED, "instance"]
    assert list(inspect.signature(own_forward(module)).parameters) == ["calls", "other"]


def test_the_signature_of_a_class_is_that_of_its_own_forward():
    module = Own()
    add_step(module, EXPERTS, step(EXPERTS))
    assert list(inspect.signature(own_forward(module)).parameters) == ["calls", "by"]


@pytest.mark.parametrize("inner_first", [False, True])
def test_a_short_cut_gives_way_to_a_step_inside_of_it(inner_first):
    module = Own()

    def install_planned():
        add_step(module, PLANNED, lambda self, calls: calls.append("short") or 1, step(PLANNED))

    if not inner_first:
        install_planned()
        assert calls_of(module, 1) == ["short"] and not has_inner(module, PLANNED)
    add_step(module, EXPERTS, step(EXPERTS))
    if inner_first:
        install_planned()
    assert calls_of(module, 200) == [PLANNED, EXPERTS, "own"] and has_inner(module, PLANNED)


def test_a_copy_runs_its_own_modules():
    module = Own()
    module.weight = nn.Parameter(torch.zeros(()))

    def seen(self, calls):
        calls.append(id(self))
        return 1

    module.forward = MethodType(seen, module)
    for place in (PLANNED, STAGE):
        add_step(module, place, step(place))
    copied = copy.deepcopy(module)
    add_step(copied, DROPOUT, step(DROPOUT))
    assert calls_of(copied, 1000) == [DROPOUT, STAGE, PLANNED, id(copied)]
    assert calls_of(module, 100) == [STAGE, PLANNED, id(module)]


def test_what_ran_before_runs_again_after_a_block():
    own, planned = Own(), Own()
    add_step(planned, PLANNED, step(PLANNED))
    before = [dict(module.__dict__) for module in (own, planned)]
    with restored_forwards([own, planned]):
        for module in (own, planned):
            add_step(module, EXPERTS, step(EXPERTS))
        assert calls_of(planned, 200) == [PLANNED, EXPERTS, "own"]
    assert calls_of(own, 2) == ["own"] and calls_of(planned, 20) == [PLANNED, "own"]
    assert [dict(module.__dict__) for module in (own, planned)] == before


class TestDescribed:
    """`describe_plan(model, name)`: what a call of one module runs."""

    @pytest.fixture(scope="class")
    @staticmethod
    def model():
        with fake_mesh(MeshSpec.parse("dp=2,cp=2,tp=2")) as mesh:
            model = tiny_model("llama", torch.float32)
            parallelize_model(model, mesh, zero=3, recompute="full")
        return model

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("", ["the model, a FSDPLlamaForCausalLM", "sequences   gets this rank's part of each sequence", "own "]),
            ("model.layers.0", ["hook        fully_shard: pre forward", "recomputed  saves its inputs", "own "]),
            ("model.layers.0.self_attn", ["gather(hidden_states)", "planned ", "own ", "attention   attends over"]),
            ("model.layers.1.self_attn.o_proj", ["rowwise(heads)", "output: all_reduce; backward", "48x48  48x24  "]),
            ("model.norm", ["a LlamaRMSNorm, sequence", "own ", "replicated"]),
        ],
    )
    def test_the_steps_in_their_order(self, model, name, expected):
        text = describe_plan(model, name)
        places = [text.find(part) for part in expected]
        assert -1 not in places and places == sorted(places), text

    def test_a_name_that_no_module_has(self, model):
        what = r"no-such-module: the model has no module 'model.layer.0.mlp'.*\n.*model\.layers\.0\.mlp"
        with pytest.raises(ModelError, match=what):
            describe_plan(model, "model.layer.0.mlp")

    def test_a_module_of_another_stage(self):
        with fake_mesh(MeshSpec.parse("pp=2")) as mesh:
            model = tiny_model("llama", torch.float32)
            parallelize_model(model, mesh)
            with pytest.raises(ModelError, match="no-such-module: another pipeline stage has lm_head"):
                describe_plan(model, "lm_head")
