"""A style that no one here wrote: registered, used from YAML, checked, explained, verified and described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallelize
from parallelize import (
    Contract,
    Conversion,
    PlanError,
    Style,
    Traits,
    Use,
    describe_plan,
    explain,
    lint,
    parallelize_module,
    register_style,
    verify,
)
from parallelize.base.mesh import MeshSpec
from parallelize.ops.collectives import sum_both
from parallelize.plan.models.model_source import ModelSource
from parallelize.plan.plan_file import parse_plan
from parallelize.plan.styles.style import STYLES
from parallelize.state.randomness.dropout.install import _layout_changes
from parallelize.state.records import record_of
from parallelize.tools.analysis.record.shapes import fake_mesh

HIDDEN, WIDTH, VOCAB = 12, 16, 31


class GatedUnit(nn.Module):
    """Two projections in one module, as kernels for SwiGLU have them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(WIDTH, HIDDEN) / 3)
        self.up = nn.Parameter(torch.randn(WIDTH, HIDDEN) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, self.gate)) * F.linear(x, self.up)


class ScaleToOne(nn.Module):
    """Divides by the sum of squares over all features, of which a rank has a shard."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (1 + x.pow(2).sum(-1, keepdim=True))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, HIDDEN)
        self.unit, self.scale = GatedUnit(), ScaleToOne()
        self.down = nn.Linear(WIDTH, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.emb(ids)
        return self.head(h + self.down(self.scale(self.unit(h))))


def inputs(batch, sequence):
    return {"ids": torch.randint(VOCAB, (batch, sequence)), "targets": torch.randint(VOCAB, (batch, sequence))}


def model():
    return {"model": Block(), "inputs": inputs}


def forward_on_shards(module, group):
    def forward(self, x):
        return x / (1 + sum_both(x.pow(2).sum(-1, keepdim=True), group))

    return forward


def gated(style, module, context):
    enter = Conversion.GATHER_SEQUENCE if context.sequence_parallel else Conversion.COPY
    return Contract(style.word, enter, uses=dict.fromkeys(module.shapes, Use(0, style.unit)))


def gated_without_conversion(style, module, context):
    return Contract(style.word, uses=dict.fromkeys(module.shapes, Use(0, style.unit)))


def scaled(style, module, context):
    return Contract(style.word, forward_factory=forward_on_shards)


def scaled_locally(style, module, context):
    return Contract(style.word)


PLAN = """\
schema_version: 1
classes: [Block]
tensor_parallel:
  emb: replicate
  unit: {unit}
  scale: {scale}
  down: rowwise
  head: replicate
"""


@pytest.fixture
def styles(monkeypatch):
    monkeypatch.setattr("parallelize.plan.styles.style.STYLES", STYLES)
    before = dict(STYLES)
    options = {"unit": None}
    for word, build in [("gated", gated), ("unconverted", gated_without_conversion)]:
        register_style(Style(word, build, options, "unit", Traits(splits_output=True)))
    for word, build in [("scaled", scaled), ("unscaled", scaled_locally)]:
        register_style(Style(word, build, traits=Traits(keeps_layout=True)))
    yield
    STYLES.clear()
    STYLES.update(before)


def plan(unit="gated", scale="scaled"):
    return parse_plan(PLAN.format(unit=unit, scale=scale), "own.yaml", "own")


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
def test_it_is_right(styles, mesh):
    result = verify(model, plan(), mesh)
    assert result.ok, result


@pytest.mark.parametrize("wrong", [{"unit": "unconverted"}, {"scale": "unscaled"}])
def test_a_wrong_contract_is_found(styles, wrong):
    assert not verify(model, plan(**wrong), "tp=2").ok


def test_it_is_explained_linted_and_described(styles):
    source = ModelSource("block", lambda _: Block(), extras={"inputs": inputs})
    lines = explain(source, plan(), "tp=2", sequence=8).parameters
    shards = {line.name: (line.style, line.full, line.local) for line in lines}
    assert shards["unit.gate"] == ("gated", (WIDTH, HIDDEN), (WIDTH // 2, HIDDEN))
    assert not [finding for finding in lint(source, plan(), "tp=2") if finding.severity == "error"]
    with fake_mesh(MeshSpec(tp=2)) as mesh:
        text = describe_plan(parallelize_module(Block(), mesh, plan(), src_data_rank=None))
    assert re.search(r"unit\.up\s.*gated", text)


def test_dropout_behind_it_draws_the_masks_of_its_shard(styles):
    with fake_mesh(MeshSpec(tp=2)) as mesh:
        record = record_of(parallelize_module(Block(), mesh, plan(), src_data_rank=None))
    changes = dict(_layout_changes(record))
    assert changes["unit"] is not None and changes["unit"].layout.shape[0] == WIDTH and changes["down"] is None


def test_mistakes_with_it_have_places(styles):
    with pytest.raises(PlanError, match=r"own.yaml:5:\d+: unknown-style-option"):
        plan(unit="gated(width=3)")
    with pytest.raises(PlanError, match="unknown-style"):
        plan(unit="gatd")
    with pytest.raises(PlanError, match="repeated-style"):
        register_style(Style("colwise", gated))
    with pytest.raises(PlanError, match="bad-style"):
        register_style(Style("two words", gated))


def test_styles_are_asked_and_not_compared_by_word():
    """Outside of `styles/` no code compares a style's word; soundness has a check of `shard` alone."""
    root = Path(parallelize.__file__).parent
    compares = re.compile(r"(style\.word|contract\.style|contract\.compute) (==|!=|in|not in) ")
    places = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        if "styles" not in path.relative_to(root).parts
        for line in path.read_text().splitlines()
        if compares.search(line)
    ]
    allowed = ["plan/soundness.py", "axes/tensor/install/installer.py: return forwards[contract.compute]"]
    assert not [place for place in places if not place.startswith(tuple(allowed))], places
    assert sum(place.startswith("plan/soundness.py") for place in places) == 1
