"""A plan is followed through one forward: what needs all of a sharded dim is named, and shipped plans have no false
alarm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize.base.errors import Problem
from parallelize.base.mesh import MeshSpec
from parallelize.plan.choose import choose_plan
from parallelize.plan.dims.plan_check import trace_plan
from parallelize.plan.model_facts import describe
from parallelize.plan.models.miniature.rates import disable_dropout
from parallelize.plan.options import Options
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.resolve import resolve
from parallelize.plan.schema import Plan
from parallelize.plan.styles.notation import parse_style
from tests.support.models import FAMILIES, tiny_batch, tiny_model

QUICK = ("llama", "gpt2", "phi3", "qwen3", "bert", "olmo2")
FAMILY_CASES = [pytest.param(f, marks=() if f in QUICK else pytest.mark.sweep) for f in FAMILIES]


def problems_of(model: nn.Module, plan: Plan, inputs: dict, tp: int = 2) -> list[Problem]:
    disable_dropout(model.train())
    resolved = resolve(plan, describe(model), MeshSpec([("tp", tp)]), Options(sequence_parallel=False))
    return list(trace_plan(model, inputs, resolved).problems)


def of_family(family: str, change: dict[str, str] | None = None, tp: int = 2) -> list[Problem]:
    model = tiny_model(family, torch.float32)
    inputs = {"input_ids": tiny_batch()[0], **({"use_cache": False} if hasattr(model.config, "use_cache") else {})}
    return problems_of(model, changed(choose_plan(model)[0], change or {}), inputs, tp)


def changed(plan: Plan, change: dict[str, str]) -> Plan:
    patterns = {rule.pattern for rule in plan.rules}
    assert patterns >= change.keys(), patterns
    rules = [
        replace(rule, style=parse_style(change[rule.pattern], "a test")) if rule.pattern in change else rule
        for rule in plan.rules
    ]
    return replace(plan, rules=tuple(rules))


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_shipped_plans_have_no_mistakes(family):
    assert of_family(family) == []


BLOCK = "model.layers.*.self_attn"
MLP = "model.layers.*.mlp"


@pytest.mark.parametrize(
    ("family", "change", "slug", "name"),
    [
        ("llama", {f"{BLOCK}.o_proj": "rowwise(heads, input=full)"}, "input-split-twice", f"{BLOCK}.o_proj.weight"),
        ("llama", {f"{MLP}.{{gate,up}}_proj": "colwise(output=full)"}, "input-not-sharded", f"{MLP}.down_proj.weight"),
        ("llama", {f"{MLP}.down_proj": "replicate"}, "left-full", f"{MLP}.down_proj.weight"),
        ("qwen3", {f"{BLOCK}.{{q,k}}_norm": "replicate(gradient=full)"}, "unsummed-gradient", f"{BLOCK}.q_norm.weight"),
        ("gpt2", {"transformer.h.*.attn.c_attn": "colwise(heads)"}, "divided-features", "c_attn.weight"),
    ],
)
def test_mistakes_are_named(family, change, slug, name):
    problems = of_family(family, change)
    matching = [problem for problem in problems if problem.slug == slug]
    assert matching, [str(problem) for problem in problems]
    assert any(name in problem.what for problem in matching)


def test_a_full_input_is_named_with_what_makes_it():
    text = "schema_version: 1\ntensor_parallel: {up: colwise(output=full), down: rowwise}"
    (problem,) = problems_of(Mixes(F.gelu), parse_plan(text), {"x": torch.randn(2, 3, 12)})
    assert problem.slug == "input-not-sharded" and ("its input is of", "up: colwise(output=full)") in problem.rows


class Mixes(nn.Module):
    """Between two linears, an operation over all features."""

    def __init__(self, operation):
        super().__init__()
        self.up, self.down, self.operation = nn.Linear(12, 20), nn.Linear(20, 12), operation

    def forward(self, x):
        return self.down(self.operation(self.up(x)))


MIX = "schema_version: 1\ntensor_parallel: {up: colwise, down: rowwise}"


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (lambda x: F.softmax(x, -1), "softmax"),
        (lambda x: x - x.mean(-1, keepdim=True), "mean"),
        (lambda x: F.layer_norm(x, (20,)), "a norm over it"),
        (lambda x: x.topk(20, -1).values, "topk"),
        (lambda x: x / x.amax(-1, keepdim=True), "amax"),
        (lambda x: x.flip(-1), "flip"),
        (lambda x: x.cumsum(-1), "cumsum"),
        (lambda x: torch.cat((x[..., 5:], x[..., :10], x[..., :15], x[..., 10:]), -1)[..., :20], "a slice"),
    ],
)
def test_operations_over_sharded_features_are_named_with_their_line(operation, text):
    problems = problems_of(Mixes(operation), parse_plan(MIX), {"x": torch.randn(2, 3, 12)})
    assert {"mixed-features", "divided-features"} & {problem.slug for problem in problems}
    assert any(text in problem.what for problem in problems), [problem.what for problem in problems]
    mixed = [problem.what for problem in problems if problem.slug == "mixed-features"]
    assert any("test_plan_check.py:" in what for what in mixed), mixed


def test_parts_in_another_order_are_named_by_their_sizes():
    halves_swapped = Mixes(lambda x: torch.cat((x[..., 10:], x[..., :10]), -1))
    problems = problems_of(halves_swapped, parse_plan(MIX), {"x": torch.randn(2, 3, 12)})
    assert {problem.slug for problem in problems} == {"divided-features"}
    assert any("down.weight: the forward splits it into parts of [10, 10]" in problem.what for problem in problems)
    by_parts = MIX.replace("colwise", "'colwise(chunks=2)'").replace("rowwise", "'rowwise(chunks=2)'")
    assert not problems_of(halves_swapped, parse_plan(by_parts), {"x": torch.randn(2, 3, 12)})


@pytest.mark.parametrize("operation", [F.gelu, lambda x: x * 2 + 1, lambda x: x.view(2, 3, 4, 5).flatten(2)])
def test_operations_on_each_feature_are_right(operation):
    assert problems_of(Mixes(operation), parse_plan(MIX), {"x": torch.randn(2, 3, 12)}) == []


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        q = self.q(x).view(2, 3, 3, 8).transpose(1, 2)  # three heads of width 8
        return self.o(F.softmax(q @ q.transpose(-1, -2), -1).matmul(q).transpose(1, 2).reshape(2, 3, 24))


def test_ranges_that_cut_a_head_are_refused():
    plan = parse_plan("schema_version: 1\ntensor_parallel: {q: colwise, o: rowwise}")
    problems = problems_of(Heads(), plan, {"x": torch.randn(2, 3, 12)}, tp=2)
    assert {problem.slug for problem in problems} == {"divided-units"}
    assert "units of 8" in problems[0].what
    assert problems_of(Heads(), plan, {"x": torch.randn(2, 3, 12)}, tp=3) == []


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(12, 24), nn.Linear(24, 12), nn.LayerNorm(12)

    def forward(self, x):
        return self.down(F.relu(self.up(self.norm(x))))


def test_a_gradient_that_is_complete_must_not_be_summed():
    text = "schema_version: 1\ntensor_parallel: {up: colwise, down: rowwise, norm: replicate(gradient=partial)}"
    problems = problems_of(Scaled(), parse_plan(text), {"x": torch.randn(2, 3, 12)})
    assert {problem.slug for problem in problems} == {"summed-twice"}


class Branches(nn.Module):
    """A block, and one beside it that a forward runs where it is asked to."""

    def __init__(self):
        super().__init__()
        self.main, self.side = Mixes(F.gelu), Mixes(F.gelu)

    def forward(self, x, both: bool = False):
        return self.main(x) + self.side(x) if both else self.main(x)


BRANCHES = "schema_version: 1\ntensor_parallel: {main.up: colwise, main.down: rowwise, side.up: UP, side.down: DOWN}"


@pytest.mark.parametrize(
    ("up", "down", "slug"),
    [
        ("colwise", "rowwise", ""),
        ("'colwise(chunks=2)'", "'rowwise(chunks=2)'", "divided-features"),
        ("'colwise(output=full)'", "rowwise", "input-not-sharded"),
        ("colwise", "replicate", "left-full"),
    ],
)
def test_what_the_forward_does_not_run_is_not_judged(up, down, slug):
    plan = parse_plan(BRANCHES.replace("UP", up).replace("DOWN", down))
    x = torch.randn(2, 3, 12)
    assert problems_of(Branches(), plan, {"x": x}) == []
    found = {problem.slug for problem in problems_of(Branches(), plan, {"x": x, "both": True})}
    assert found == ({slug} if slug else set())


def test_a_mistake_in_what_the_forward_runs_is_named_beside_a_branch_that_it_leaves_out():
    text = (
        BRANCHES.replace("main.up: colwise", "main.up: replicate").replace("UP", "colwise").replace("DOWN", "rowwise")
    )
    problems = problems_of(Branches(), parse_plan(text), {"x": torch.randn(2, 3, 12)})
    assert {problem.slug for problem in problems} == {"left-full", "input-not-sharded"}
    assert all(problem.what.startswith("main.") for problem in problems)
