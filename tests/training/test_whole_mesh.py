"""Families whose layers differ from each other, cut into stages, and more stages than the matrix has."""

from __future__ import annotations

import pytest
import torch

from tests.axes.pipeline import pipeline_jobs as jobs

pytestmark = pytest.mark.processes
FAMILIES = ["qwen3-sliding", "gemma2", "gemma3-long", "blocks"]


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("zbv", 2)])
def test_each_family_in_two_stages_or_four(two_processes, schedule, stages_per_rank, family):
    two_processes.run(jobs.schedules, family, schedule, stages_per_rank, torch.float64)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipe_v"])
def test_four_ranks_of_stages(four_processes, schedule):
    four_processes.run(jobs.schedules, "gpt2", schedule, 2, torch.float64, 8)


@pytest.mark.variants(every=101)
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_ranks_of_everything(eight_processes, family):
    axes, options = {"pp": 2, "dp": 2, "tp": 2}, {"sequence_parallel": True, "loss_parallel": True, "recompute": "full"}
    if family == "blocks":
        axes, options = {"pp": 2, "dp_replicate": 2, "dp": 2}, {}
    options |= {"zero": 2, "num_microbatches": 4}
    eight_processes.run(jobs.mesh_parity, family, axes, torch.float64, options)
