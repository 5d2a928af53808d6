"""Errors of plans and of the ties that they declare, each by its slug."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from parallelize import PlanError, Tie, lint, parallelize_model, parallelize_module
from parallelize.plan.plan_file import parse_plan
from tests.support.refused import RULES, Block, refused, small_mesh


class Shared(nn.Module):
    """An embedding and a head whose weights are two objects of the same shape."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def tied(rules: dict[str, str], *members: str):
    """A plan that ties the parameters `members`."""
    lines = "\n".join(f"  {pattern}: {style}" for pattern, style in rules.items())
    plan = parse_plan(f"schema_version: 1\ntensor_parallel:\n{lines}\n", "tied.yaml")
    return replace(plan, ties=(Tie("vocabulary", members),))


@pytest.mark.parametrize(("rule", "shape"), [("norm", "[8]"), ("up.bias", "[12]")])
def test_a_dim_that_a_parameter_does_not_have(rule, shape):
    block = Block()
    block.norm = nn.LayerNorm(8)
    rules = {"norm": "shard(dim=1)", **RULES} if rule == "norm" else {"norm": "replicate", rule: "shard(dim=1)"}
    with small_mesh(tp=2) as mesh, refused(PlanError, "bad-dim", rule, shape, "no dim 1"):
        parallelize_module(block, mesh, rules)


def test_lint_finds_a_dim_that_a_parameter_does_not_have():
    findings = lint(Block, {"up": "shard(dim=1)", "down": "rowwise"}, "tp=2")
    assert [(finding.severity, finding.problem.slug) for finding in findings] == [("error", "bad-dim")]


def test_a_tie_of_a_parameter_that_does_not_exist():
    plan = tied({"embed": "embedding", "head": "colwise"}, "embed.weight", "haed.weight")
    with small_mesh(tp=2) as mesh, refused(PlanError, "unknown-parameter", "haed.weight", "`head.weight`"):
        parallelize_model(Shared(), mesh, plan)


def test_a_tie_of_two_shapes():
    plan = tied(RULES, "up.weight", "down.weight")
    with small_mesh(tp=2) as mesh, refused(PlanError, "tie-shapes-differ", "vocabulary", "[8, 12]", "[12, 8]"):
        parallelize_model(Block(), mesh, plan)


def test_a_tie_of_two_layouts():
    plan = tied({"embed": "embedding", "head": "rowwise(input=full)"}, "embed.weight", "head.weight")
    named = ("vocabulary", "embed.weight", "dim 0", "head.weight", "dim 1")
    with small_mesh(tp=2) as mesh, refused(PlanError, "tie-layouts-differ", *named):
        parallelize_model(Shared(), mesh, plan)
