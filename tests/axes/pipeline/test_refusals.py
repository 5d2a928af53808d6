"""Errors of pipelines and of the order of application on a mesh, each by its slug."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallelize import (
    Cuts,
    MeshError,
    ModelError,
    Pipeline,
    PipelineError,
    ShapeError,
    build_mesh,
    cut_pipeline,
    parallelize_model,
    parallelize_module,
    shard_data,
)
from tests.support.refused import RULES, WIDTH, Block, refused, small_mesh
from tests.support.threads import run_ranks

CUTS = Cuts("blocks", first=("embed",), last=("head",))
IDS = torch.arange(8).view(4, 2)


class Tower(nn.Module):
    """An embedding, four blocks and a head: two stages or more."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return hidden + self.inner(hidden) * scale


class ScaledTower(Tower):
    """Each block takes a second tensor, which is computed from the embedding's output and needs no gradient."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        scale = hidden.detach().abs().mean()
        for block in self.blocks:
            hidden = block(hidden, scale)
        return self.head(hidden)


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.inner(part) for part in parts]


class ListedTower(Tower):
    """Blocks whose output is a list of 300 tensors."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Listed() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = [self.embed(ids)] * 300
        for block in self.blocks:
            parts = block(parts)
        return self.head(torch.stack(parts).mean(0))


# -- splitting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}])
def test_a_mesh_without_pp(sizes):
    with small_mesh(**sizes) as mesh, refused(MeshError, "no-pp-axis", "dp=2", "pp=2"):
        cut_pipeline(Tower(), mesh, cuts=CUTS)


def test_a_model_that_is_split_twice():
    with small_mesh(pp=2) as mesh:
        model = cut_pipeline(Tower(), mesh, cuts=CUTS)
        with refused(ModelError, "already-cut", "Tower"):
            cut_pipeline(model, mesh, cuts=CUTS)


def test_a_plan_before_the_stages():
    with small_mesh(pp=2, tp=2) as mesh:
        model = parallelize_module(Block(), mesh, RULES)
        with refused(ModelError, "wrong-order", "Block has a plan", "cut_pipeline, parallelize_module"):
            cut_pipeline(model, mesh, cuts=CUTS)


def test_a_schedule_that_the_model_was_not_split_for():
    fix = "the same schedule to cut_pipeline"
    with small_mesh(pp=2) as mesh:
        model = cut_pipeline(Tower(), mesh, cuts=CUTS, schedule="1f1b")
        with refused(ModelError, "other-schedule", "(0, 1, 1, 0)", "the model on (0, 1)", fix):
            Pipeline(model, mesh, schedule="zbv", num_microbatches=4)


@pytest.mark.parametrize("part", ["cut_pipeline", "shard_data"])
def test_one_step_of_application_before_all_of_them(part):
    with small_mesh(pp=2, dp=2) as mesh:
        model = cut_pipeline(Tower(), mesh, cuts=CUTS) if part == "cut_pipeline" else shard_data(Tower(), mesh)
        with refused(ModelError, "wrong-order", "parallelize_model alone"):
            parallelize_model(model, mesh, cuts=CUTS)


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [{}, {"scale": 2.0}, {"ids": [1, 2]}, {"scale": torch.tensor(2.0)}])
def test_a_step_without_a_batch(inputs):
    with small_mesh(dp=2) as mesh:
        pipeline = Pipeline(Tower(), mesh)
        with refused(ShapeError, "no-inputs", "no tensor", "input_ids="):
            pipeline.step(**inputs, targets=IDS)


def test_a_call_of_a_model_that_has_stages():
    with small_mesh(pp=2) as mesh:
        model = cut_pipeline(Tower(), mesh, cuts=CUTS)
        Pipeline(model, mesh, num_microbatches=2)
        with refused(ModelError, "stage-called-alone", "embed", "Pipeline.step"):
            model(IDS)


def failures_of(model: nn.Module) -> list[str]:
    """The text of the error that a step of two stages raises, on each rank."""

    def body(rank: int) -> str:
        mesh = build_mesh("cpu", pp=2)
        part = cut_pipeline(copy.deepcopy(model), mesh, cuts=CUTS)
        pipeline = Pipeline(part, mesh, num_microbatches=2)
        with pytest.raises(PipelineError) as caught:
            pipeline.step(IDS, targets=IDS.flip(0))
        return str(caught.value)

    return run_ranks(2, body)


def test_an_argument_that_only_the_first_stage_can_compute():
    for text in failures_of(ScaledTower()):
        assert "argument-not-carried" in text and "argument scale of blocks.1" in text


def test_more_tensors_than_a_message_has():
    for text in failures_of(ListedTower()):  # the sender's error is raised on the receiver too, which waits for nothing
        assert "stage-failed" in text and "too-many-tensors" in text and "300 tensors" in text and "256" in text


def test_more_tensors_within_one_rank_need_no_message():
    mesh_of_one = {"schedule": "looped_bfs", "stages_per_rank": 2}
    with small_mesh(pp=1) as mesh:
        part = cut_pipeline(ListedTower(), mesh, cuts=CUTS, **mesh_of_one)
        Pipeline(part, mesh, num_microbatches=2, **mesh_of_one).step(IDS, targets=IDS.flip(0))
