"""Mistakes that `lint` and `explain` report, each by its slug."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallelize import Finding, PlanError, explain, lint
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.analysis.cost.machine import PROFILES
from tests.support.refused import RULES, WIDTH, Block, refused

# -- hardware ----------------------------------------------------------------------------------------------------------

SHIPPED = PROFILES / "cpu.yaml"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("kernel_us:", "kernel_ms:", ("1 constants", "kernel_us", "None")),
        ("node_ranks: {value: 64,", "node_ranks: {value: 1.5,", ("node_ranks", "1.5")),
    ],
)
def test_hardware_with_a_wrong_constant(tmp_path, old, new, named):
    text = SHIPPED.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "rack.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with refused(PlanError, "bad-hardware", "rack.yaml", *named):
        explain(Block, RULES, "tp=2", hardware=path)


@pytest.mark.parametrize("content", [b"memory_bytes: [1, 2", b"\xff\xfe\x00"])
def test_hardware_that_is_no_yaml(tmp_path, content):
    path = tmp_path / "rack.yaml"
    path.write_bytes(content)
    with refused(PlanError, "bad-hardware", "rack.yaml", "cannot read it"):
        explain(Block, RULES, "tp=2", hardware=path)


# -- the forward -------------------------------------------------------------------------------------------------------


def finding_of(model: type[nn.Module], plan: Any, slug: str) -> Finding:
    """The only finding of this slug, for a model whose forward takes hidden states."""

    def build() -> dict[str, Any]:
        return {"model": model(), "inputs": lambda batch, sequence: {"hidden": torch.zeros(batch, sequence, WIDTH)}}

    findings = [finding for finding in lint(build, plan, "tp=2") if finding.problem.slug == slug]
    assert len(findings) == 1, findings
    return findings[0]


class Picking(Block):
    """The number of tokens that it works on depends on their values."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden[hidden[..., 0] > 0])


def test_a_forward_that_needs_values():
    finding = finding_of(Picking, RULES, "cannot-run-forward")
    assert finding.severity == "warning"
    assert "nonzero" in finding.problem.what and "parallelize verify" in finding.problem.fix


class Sparing(Block):
    """Has a linear that its forward does not call."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


def test_a_rule_for_a_module_that_is_not_called():
    finding = finding_of(Sparing, {**RULES, "spare": "replicate"}, "never-called")
    assert finding.severity == "warning" and "spare is planned" in finding.problem.what


class Heads(nn.Module):
    """Splits its input into heads, by attributes, and joins them again."""

    def __init__(self):
        super().__init__()
        self.heads, self.width = 4, WIDTH // 4
        self.project, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(self.project(hidden).view(len(hidden), -1, self.heads, self.width).flatten(2))


class Pooling(nn.Module):
    """Takes the mean of its attention's output over the sequence, however long that is."""

    def __init__(self):
        super().__init__()
        self.attention = Heads()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(hidden).mean(1)


HALF_PLANNED = """
schema_version: 1
sizes: {heads: 4}
tensor_parallel: {attention.project: replicate, attention.out: rowwise(heads)}
local: {attention: {heads: heads}}
"""


def test_a_view_of_local_heads_on_a_full_projection():
    """Half of the heads make twice as many tokens of an unsharded projection, and every call succeeds."""
    finding = finding_of(Pooling, parse_plan(HALF_PLANNED, "half.yaml"), "misread-shape")
    assert finding.severity == "error" and "attention misreads local shapes" in finding.problem.what
    assert finding.problem.rows == (("returns", "[2, 48, 8]; unsharded [2, 24, 8]"),)
    assert "half.yaml" in finding.problem.where and "`local:`" in finding.problem.fix


class Layer(nn.Module):
    """Returns its attention's output."""

    def __init__(self):
        super().__init__()
        self.attention = Heads()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(hidden)


class PoolingLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.mean(1)


@pytest.mark.parametrize("rule", ["layers.*.attention: replicate", ""])
def test_a_misread_shape_is_reported_for_the_innermost_module(rule):
    """The layer returns the same wrong shape, and the projection after the view gets one: neither is the cause."""
    lines = ["layers.*.attention.project: replicate", "layers.*.attention.out: rowwise(heads)"]
    text = HALF_PLANNED.splitlines()
    text[3] = "tensor_parallel: {" + ", ".join([*([rule] if rule else []), *lines]) + "}"
    text[4] = "local: {layers.*.attention: {heads: heads}}"
    finding = finding_of(PoolingLayers, parse_plan("\n".join(text), "half.yaml"), "misread-shape")
    assert finding.problem.what == "layers.*.attention misreads local shapes"
