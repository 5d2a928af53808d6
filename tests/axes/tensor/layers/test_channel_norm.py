"""Convolutions as linears over channels, with the norms between them: numbers, running statistics, refusals."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallelize import ModelError, PlanError, build_mesh, derive_plan, parallelize_module
from parallelize.plan.plan_file import parse_plan
from parallelize.tools.verification.verify import verify
from tests.support.refused import refused, small_mesh
from tests.support.threads import run_ranks


class InvertedBottleneck(nn.Module):
    """1x1 to more channels, each by itself, and back, with batch norms; the last one normalizes full channels."""

    def __init__(self, momentum: float | None = 0.1):
        super().__init__()
        self.expand, self.norm1 = nn.Conv2d(6, 16, 1, bias=False), nn.BatchNorm2d(16, momentum=momentum)
        self.depthwise, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16, momentum=momentum)
        self.project, self.norm3 = nn.Conv2d(16, 6, 3, padding=1), nn.BatchNorm2d(6)

    def forward(self, x):
        y = self.norm1(self.expand(x)).relu()
        return x + self.norm3(self.project(self.norm2(self.depthwise(y)).relu()))


class ResidualBlock(nn.Module):
    """Of a diffusion model: a condition is added to the channels, and a norm of groups follows."""

    def __init__(self):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, 6), nn.Conv2d(6, 24, 3, padding=1)
        self.time, self.norm2, self.conv2 = nn.Linear(5, 24), nn.GroupNorm(4, 24), nn.Conv2d(24, 6, 3, padding=1)

    def forward(self, x, time):
        hidden = self.conv1(self.norm1(x).relu()) + self.time(time)[:, :, None, None]
        return x + self.conv2(self.norm2(hidden).relu())


class GroupedBottleneck(nn.Module):
    """1x1 to more channels, in four groups of four, with weights of the channels from their means, and back."""

    def __init__(self, groups: int = 4):
        super().__init__()
        self.expand, self.grouped = nn.Conv2d(6, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=groups)
        self.norm, self.project = nn.BatchNorm2d(16), nn.Conv2d(16, 6, 1)
        self.squeeze, self.excite = nn.Conv2d(16, 3, 1), nn.Conv2d(3, 16, 1)

    def forward(self, x):
        y = self.norm(self.grouped(self.expand(x).relu()))
        return x + self.project(y * self.excite(self.squeeze(y.mean((2, 3), keepdim=True)).relu()).sigmoid())


IMAGE = torch.randn(3, 6, 5, 4)
BOTTLENECK = """
schema_version: 1
tensor_parallel:
  expand: colwise
  norm{1,2}: channel_norm
  depthwise: shard(0)
  project: rowwise
  norm3: replicate
"""


def test_a_bottleneck_is_derived_and_proven():
    derived = derive_plan(InvertedBottleneck(), {"x": IMAGE})
    assert {rule.pattern: str(rule.style) for rule in derived.plan.rules} == {
        "expand": "colwise",
        "norm{1,2}": "channel_norm",
        "depthwise": "shard(0)",
        "project": "rowwise",
        "**": "replicate",
    }
    assert derived.proof.ok and derived.whole == {}


@pytest.mark.parametrize("tp", [2, 4])
def test_groups_of_a_convolution_are_sharded(tp):
    """A rank convolves its groups of channels, as its attribute `groups` says."""
    derived = derive_plan(GroupedBottleneck(), {"x": IMAGE}, tp=tp)
    styles = {rule.pattern: str(rule.style) for rule in derived.plan.rules}
    assert styles["grouped"] == "shard(0)" and derived.proof.ok and derived.whole == {}
    assert {styles[name] for name in ("expand", "excite")} == {"colwise"}


def test_a_group_of_channels_is_not_cut():
    plan = parse_plan(
        "schema_version: 1\ntensor_parallel: {expand: colwise, grouped: shard(0), project: rowwise, '**': replicate}"
    )
    model = nn.Sequential()
    model.expand, model.grouped, model.project = (
        nn.Conv2d(6, 12, 1),
        nn.Conv2d(12, 12, 3, groups=3),
        nn.Conv2d(12, 6, 1),
    )
    with refused(PlanError, "uneven-heads", "grouped", "3 of width 4"), small_mesh(tp=2) as mesh:
        parallelize_module(model, mesh, plan)


def test_groups_of_channels_are_not_cut():
    derived = derive_plan(ResidualBlock(), {"x": IMAGE, "time": torch.randn(3, 5)})
    assert {rule.pattern: str(rule.style) for rule in derived.plan.rules} == {
        "conv1": "colwise(groups)",
        "time": "colwise(groups)",
        "norm2": "channel_norm(groups)",
        "conv2": "rowwise(groups)",
        "**": "replicate",
    }
    assert derived.proof.ok and derived.plan.sizes["groups"].source == 4


def test_groups_of_a_norm_may_be_a_number_of_its_code():
    """No field of the config says it; a model whose norm has other groups is refused."""
    model = ResidualBlock()
    model.config = SimpleNamespace(model_type="", width=99)
    derived = derive_plan(model, {"x": IMAGE, "time": torch.randn(3, 5)})
    assert derived.proof.ok and derived.plan.sizes["groups"].source == 4
    other = ResidualBlock()
    other.norm2 = nn.GroupNorm(6, 24)
    with refused(PlanError, "uneven-heads", "norm2", "groups of 6, or 6 heads of 4"), small_mesh(tp=2) as mesh:
        parallelize_module(other, mesh, derived.plan)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_the_unsharded_model(momentum):
    torch.manual_seed(0)
    model = InvertedBottleneck(momentum).double()
    expected, batches = copy.deepcopy(model), [torch.randn(3, 6, 5, 4, dtype=torch.float64) + i for i in range(3)]
    for batch in batches:
        expected(batch)
    expected.eval()

    def rank(_):
        local = copy.deepcopy(model)
        parallelize_module(local, build_mesh("cpu", tp=2), parse_plan(BOTTLENECK))
        for batch in batches:
            local(batch)
        local.eval()
        return dict(local.named_buffers()), local(batches[0]).detach()

    for buffers, out in run_ranks(2, rank, timeout_s=60):
        for name, value in expected.named_buffers():
            torch.testing.assert_close(buffers[name], value, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(out, expected(batches[0]), rtol=1e-12, atol=1e-12)


@pytest.mark.sweep
@pytest.mark.parametrize("mesh", ["tp=4"])  # over data ranks each has batch statistics of its own
def test_a_residual_block_on_other_meshes(mesh):
    plan = derive_plan(ResidualBlock(), {"x": IMAGE, "time": torch.randn(3, 5)}).plan
    inputs = {"x": torch.randn(12, 6, 5, 4), "time": torch.randn(12, 5), "targets": torch.zeros(12)}

    def factory():
        def loss(output, targets):
            return (output**3).sum()

        return {
            "model": ResidualBlock(),
            "inputs": lambda b, n: {k: v[:b] for k, v in inputs.items()},
            "loss": loss,
            "count": lambda targets: 1,
        }

    assert verify(factory, plan, mesh, full_size=True).ok


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


def test_a_norm_with_a_forward_of_its_own_is_refused():
    model = InvertedBottleneck()
    model.norm1 = OwnNorm(16)
    with refused(ModelError, "not-channel-norm", "norm1", "OwnNorm"), small_mesh(tp=2) as mesh:
        parallelize_module(model, mesh, parse_plan(BOTTLENECK))


def test_statistics_of_unequal_parts_are_refused():
    model = InvertedBottleneck()
    model.expand, model.norm1 = nn.Conv2d(6, 15, 1), nn.BatchNorm2d(15)
    model.depthwise, model.norm2 = nn.Conv2d(15, 15, 3, padding=1, groups=15), nn.BatchNorm2d(15)
    model.project = nn.Conv2d(15, 6, 3, padding=1)
    with refused(ModelError, "divided-statistics", "norm1"), small_mesh(tp=2) as mesh:
        parallelize_module(model, mesh, parse_plan(BOTTLENECK))


@pytest.mark.parametrize("option", ["output=vocabulary", "input=full"])
def test_channels_are_not_split_at_a_boundary(option):
    with refused(PlanError, "wrong-module-for-style", "expand", option.partition("=")[0]), small_mesh(tp=2) as mesh:
        parallelize_module(
            InvertedBottleneck(),
            mesh,
            parse_plan(BOTTLENECK.replace("expand: colwise", f"expand: colwise({option})")),
        )
