"""Mistakes with tensor parallelism, PyTorch's style objects, parameters and embeddings, each by its slug."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from parallelize import (
    ColwiseParallel,
    DeferredGradients,
    ModelError,
    PlanError,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    ShapeError,
    accumulate_gradients,
    all_gather_linear,
    describe_plan,
    overlap_report,
    parallelize_model,
    parallelize_module,
    shard_info,
)
from parallelize.plan.schema import Plan
from tests.support.refused import RULES, WIDTH, Block, refused, small_mesh

HIDDEN = torch.randn(2, 3, WIDTH)


# -- parameters --------------------------------------------------------------------------------------------------------


def test_a_model_that_has_gradients():
    block = Block()
    block(HIDDEN).sum().backward()
    with small_mesh(tp=2) as mesh, refused(ModelError, "gradient-present", "up.weight", "zero_grad"):
        parallelize_module(block, mesh, RULES)


class _Replicated(ParallelStyle):
    """A style of a third party, for which there are no rules: it is applied as PyTorch does."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return distribute_module(module, device_mesh)


STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@pytest.mark.sweep
@pytest.mark.parametrize("plan", [RULES, STYLES, {"up": _Replicated()}], ids=["plan", "styles", "unknown style"])
def test_an_optimizer_that_steps_parameters_before_they_are_replaced(plan):
    block = Block()
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    with small_mesh(tp=2) as mesh:
        with refused(ModelError, "early-optimizer", "SGD", "build the optimizer afterwards"):
            parallelize_module(block, mesh, plan)
        assert not any(isinstance(parameter, DTensor) for parameter in block.parameters())
        del optimizer
        parallelize_module(block, mesh, plan)
        assert isinstance(block.up.weight, DTensor)


def test_an_optimizer_of_parameters_that_stay():
    block = nn.ModuleDict({"planned": Block(), "rest": nn.Linear(WIDTH, WIDTH)})
    optimizer = torch.optim.SGD(block.rest.parameters(), 0.1)
    styles = {"planned.up": ColwiseParallel(), "planned": PrepareModuleInput()}
    with small_mesh(tp=2) as mesh:
        parallelize_module(block, mesh, styles)
    assert optimizer.param_groups[0]["params"][0] is block.rest.weight


def test_a_planned_parameter_that_was_replaced():
    with small_mesh(tp=2) as mesh:
        block = parallelize_module(Block(), mesh, RULES)
        block.up.weight = nn.Parameter(torch.randn(12, WIDTH))
        with refused(ModelError, "plain-parameter", "weight", "Parameter", "load_state_dict"):
            block(HIDDEN)


def test_a_model_on_meta_without_values():
    with torch.device("meta"):
        block = Block()
    with small_mesh(tp=2) as mesh, refused(ModelError, "meta-without-values", "meta", "initialize=0"):
        parallelize_model(block, mesh, RULES)


def accumulate(module: nn.Module) -> None:
    with accumulate_gradients(module):
        pass


@pytest.mark.parametrize(
    "ask",
    [shard_info, describe_plan, overlap_report, accumulate],
    ids=["shard_info", "describe_plan", "overlap_report", "accumulate_gradients"],
)
def test_questions_about_a_model_without_a_plan(ask):
    with refused(ModelError, "not-parallelized", "Block", "parallelize_module"):
        ask(Block())


# -- rules -------------------------------------------------------------------------------------------------------------


class Outer(nn.Module):
    """Calls its block by a keyword that the caller chooses."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return self.block(**inputs)


class EitherInput(Block):
    def forward(self, hidden: torch.Tensor | None = None, embeds: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(embeds if hidden is None else hidden)


def test_a_rule_for_an_argument_that_the_forward_does_not_take():
    rules = {"block": "gather(hiden)", "block.up": "colwise", "block.down": "rowwise"}
    with small_mesh(tp=2) as mesh, refused(ModelError, "no-such-argument", "block:", "'hiden'", "it takes: hidden"):
        parallelize_module(Outer(), mesh, rules)


def test_a_call_without_the_argument_that_the_rule_converts():
    model = Outer()
    model.block = EitherInput()
    rules = {"block": "gather(hidden)", "block.up": "colwise", "block.down": "rowwise"}
    with small_mesh(tp=2) as mesh:
        parallelize_module(model, mesh, rules)
        with refused(ModelError, "no-such-argument", "`hidden`", "by position or name"):
            model(embeds=HIDDEN)


OPTIONS = [("max_norm", 1.0), ("sparse", True), ("scale_grad_by_freq", True)]


@pytest.mark.parametrize(("option", "value"), OPTIONS)
def test_an_embedding_that_looks_at_other_rows(option, value):
    model = nn.Sequential(nn.Embedding(10, WIDTH, **{option: value}))
    with small_mesh(tp=2) as mesh, refused(ModelError, "unsplittable-embedding", "0:", option, "embedding_colwise"):
        parallelize_module(model, mesh, {"0": "embedding"})


def test_such_an_embedding_under_a_style_object():
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True))
    with small_mesh(tp=2) as mesh, refused(PlanError, "unsplittable-embedding", "sparse"):
        parallelize_module(model, mesh, {"0": RowwiseParallel()})


@pytest.mark.parametrize(("plan", "kind"), [(3, "int"), ([("up", "colwise")], "list")])
def test_a_plan_that_is_no_plan(plan, kind):
    with (
        small_mesh(tp=2) as mesh,
        refused(PlanError, "bad-plan", f"cannot be a {kind}", "a dict of patterns to styles"),
    ):
        parallelize_module(Block(), mesh, plan)


def test_what_derives_a_plan_is_no_plan():
    derived = SimpleNamespace(plan=Plan("derived", ()))
    with small_mesh(tp=2) as mesh, refused(PlanError, "bad-plan", "cannot be a SimpleNamespace", "`.plan` of what"):
        parallelize_module(Block(), mesh, derived)


# -- style objects -----------------------------------------------------------------------------------------------------


def test_a_dict_in_which_a_value_is_no_style():
    block = Block()
    before = dict(block.named_parameters())
    styles = {"up": ColwiseParallel(), "down": 3}
    with small_mesh(tp=2) as mesh, refused(PlanError, "bad-plan", "'down'", "int", "not a style"):
        parallelize_module(block, mesh, styles)
    assert all(parameter is before[name] for name, parameter in block.named_parameters())


def test_a_bias_that_nobody_could_add_once():
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Partial())}
    with small_mesh(tp=2) as mesh, refused(PlanError, "bias-on-shards", "'down'", "bias=False"):
        parallelize_module(Block(), mesh, styles)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(),)),
        lambda: PrepareModuleInput(input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"y": Shard(1)}),
    ],
)
def test_layouts_of_inputs_that_do_not_pair(make):
    with refused(PlanError, "layout-count", "PrepareModuleInput", "desired input layouts"):
        make()


def test_layouts_of_outputs_that_do_not_pair():
    with refused(PlanError, "layout-count", "PrepareModuleOutput", "differ in number"):
        PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=(Replicate(), None))


def test_an_input_that_is_passed_by_keyword():
    style = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
    with small_mesh(tp=2) as mesh:
        model = parallelize_module(Outer(), mesh, {"block": style})
        with refused(ModelError, "layout-count", "block got 0", "input_layouts has 1", "input_kwarg_layouts"):
            model(hidden=HIDDEN)


def test_a_module_that_returns_fewer_outputs():
    style = PrepareModuleOutput(output_layouts=(Shard(1), None), desired_output_layouts=(Replicate(), None))
    with small_mesh(tp=2) as mesh:
        model = parallelize_module(Outer(), mesh, {"block": style})
        with refused(ModelError, "layout-count", "block returned 1", "output_layouts has 2"):
            model(hidden=HIDDEN)


# -- collective matmuls ------------------------------------------------------------------------------------------------


def test_deferred_gradients_of_dtensors():
    with small_mesh(tp=2) as mesh:
        rows = DTensor.from_local(HIDDEN, mesh, [Shard(1)])
        weight = DTensor.from_local(torch.randn(5, WIDTH), mesh, [Shard(0)])
        with refused(ShapeError, "cannot-defer", "all_gather_linear", "pass local tensors"):
            all_gather_linear(rows, weight, dim=1, deferred=DeferredGradients())
