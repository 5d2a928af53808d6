"""Pipeline, ZeRO and tensor parallelism together: everything equal to the unsharded model."""

from __future__ import annotations

import pytest
import torch

from tests.axes.pipeline import pipeline_jobs as jobs

pytestmark = pytest.mark.processes

SINGLE_STAGE = {"gpipe": 1, "1f1b": 1}
SCHEDULES = {
    **SINGLE_STAGE,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipe_v": 2,
}
MODE = {"sequence_parallel": True, "loss_parallel": True}
FAMILIES = ["llama", "gpt2", "qwen3-sliding", "gemma2", "gemma3-long", "blocks"]


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_with_and_without_a_tie(two_processes, schedule, family):
    two_processes.run(jobs.schedules, family, schedule, SCHEDULES[schedule], torch.float64)


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_each_family_in_two_stages_or_four(two_processes, schedule, family):
    two_processes.run(jobs.schedules, family, schedule, SCHEDULES[schedule], torch.float64)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "dualpipe_v"])
def test_four_ranks_of_stages(four_processes, schedule):
    four_processes.run(jobs.schedules, "gpt2", schedule, 2, torch.float64, 8)


@pytest.mark.variants(every=41)
@pytest.mark.parametrize("mode", [{}, {**MODE, "num_microbatches": 2}], ids=["tensor", "sequence, accumulated"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_stage_of_zero_with_tensor_parallelism(four_processes, zero, family, mode):
    four_processes.run(jobs.mesh_parity, family, {"dp": 2, "tp": 2}, torch.float64, {"zero": zero, **mode})


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", [{"pp": 2, "dp": 2}, {"dp_replicate": 2, "dp": 2}, {"dp": 4}], ids=str)
def test_each_stage_of_zero_on_other_meshes(four_processes, zero, axes):
    options = {"zero": zero, "num_microbatches": 2}
    four_processes.run(jobs.mesh_parity, "llama-tied", axes, torch.float64, options)
    four_processes.run(jobs.mesh_parity, "blocks", axes, torch.float64, options)


@pytest.mark.variants(every=25)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_stages_with_tensor_parallelism(four_processes, family, schedule):
    options = {**MODE, "schedule": schedule}
    four_processes.run(jobs.mesh_parity, family, {"pp": 2, "tp": 2}, torch.float64, options)


MIXTURES = [
    *(({"dp": 2, "tp": 2}, {"zero": zero, **MODE}) for zero in (0, 1, 2, 3)),
    ({"pp": 2, "tp": 2}, {"schedule": "zbv", **MODE}),
    ({"pp": 2, "tp": 2}, {"schedule": "1f1b", "num_microbatches": 4, "recompute": "full"}),
    ({"pp": 2, "dp": 2}, {"zero": 2, "num_microbatches": 2}),
    ({"dp": 2, "tp": 2}, {"zero": 3, "recompute": "selective", "num_microbatches": 2, "sequence_parallel": True}),
]


@pytest.mark.variants(every=11)
@pytest.mark.parametrize(("axes", "options"), MIXTURES)
@pytest.mark.parametrize(("family", "ep"), [("mixtral", 1), ("deepseek_v3", 2), ("gpt_oss", 1), ("gpt_oss", 2)])
def test_mixtures(four_processes, family, axes, options, ep):
    ep = ep if "tp" in axes else 1
    four_processes.run(jobs.mesh_parity, family, axes, torch.float64, {**options, "ep": ep})


FOLDED = [
    *(({"dp": 2, "tp": 2}, {"ep": ep, "zero": zero, **MODE}) for zero in (0, 1, 2, 3) for ep in (2, 4)),
    *(({"dp": 2, "tp": 2}, {"ep": 4, "zero": zero, "num_microbatches": 2}) for zero in (0, 2)),
    ({"dp": 4}, {"ep": 2, "zero": 0, "num_microbatches": 2, "recompute": "full"}),
    ({"dp": 4}, {"ep": 2, "zero": 1}),
    ({"dp": 4}, {"ep": 2, "zero": 2, "num_microbatches": 2, "recompute": "full"}),
    ({"dp": 4}, {"ep": 2, "zero": 3, "num_microbatches": 2, "recompute": "selective"}),
    ({"dp": 4}, {"ep": 4, "zero": 2, "defer": True, "num_microbatches": 3, "overlap": "chunked"}),
    ({"dp_replicate": 2, "dp": 2}, {"ep": 2, "zero": 1}),
    ({"dp_replicate": 2, "dp": 2}, {"ep": 2, "zero": 3}),
    ({"pp": 2, "dp": 2}, {"ep": 2, "zero": 2, "schedule": "zbv"}),
    ({"pp": 2, "dp": 2}, {"ep": 2, "zero": 3, "schedule": "1f1b", "num_microbatches": 4, "recompute": "full"}),
    ({"pp": 2, "dp": 2}, {"etp": 2, "zero": 2, "schedule": "zbv"}),
    ({"pp": 2, "tp": 2}, {"etp": 2, "schedule": "1f1b", "num_microbatches": 4, **MODE}),
    ({"dp": 2, "cp": 2}, {"ep": 4, "zero": 2}),
    ({"dp": 2, "cp": 2}, {"ep": 2, "zero": 3}),
    ({"cp": 4}, {"ep": 2}),
]


@pytest.mark.variants(every=19)
@pytest.mark.parametrize(("axes", "options"), FOLDED, ids=str)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_experts_folded_over_data_axes(four_processes, family, axes, options):
    """Six experts on four ranks: one or two each."""
    four_processes.run(jobs.mesh_parity, family, axes, torch.float64, dict(options))


@pytest.mark.sweep
@pytest.mark.parametrize("zero", [1, 3])
def test_a_pipeline_stage_without_experts(four_processes, zero):
    """The first layer of DeepSeek-V3 is dense, and alone on the first stage: its ranks are in the groups of the experts
    too."""
    options = {"ep": 2, "zero": zero, "layers": 2, "num_microbatches": 2}
    four_processes.run(jobs.mesh_parity, "deepseek_v3", {"pp": 2, "dp": 2}, torch.float64, options)


@pytest.mark.variants(every=101)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_ranks_of_everything(eight_processes, family, dtype):
    axes = {"pp": 2, "dp": 2, "tp": 2} if family != "blocks" else {"pp": 2, "dp_replicate": 2, "dp": 2}
    options = {"zero": 2, "num_microbatches": 4, "recompute": "full"}
    options |= MODE if family != "blocks" else {"recompute": "off"}
    eight_processes.run(jobs.mesh_parity, family, axes, dtype, options)


@pytest.mark.sweep
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_eight_ranks_of_everything_at_other_stages_of_zero(eight_processes, zero):
    options = {"zero": zero, "num_microbatches": 4, "recompute": "selective", **MODE}
    eight_processes.run(jobs.mesh_parity, "gpt2", {"pp": 2, "dp": 2, "tp": 2}, torch.float64, options)


@pytest.mark.sweep
@pytest.mark.variants(every=3)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_norms_with_shared_heads_ties_and_frozen_parameters(four_processes, zero):
    """One key/value head on both tp ranks, an embedding on two stages, norms that do not train."""
    options = {"zero": zero, "num_microbatches": 2, **MODE}
    four_processes.run(jobs.mesh_parity, "llama-shared", {"dp": 2, "tp": 2}, torch.float64, options)
    four_processes.run(jobs.mesh_parity, "llama-shared", {"pp": 2, "dp": 2}, torch.float64, {"zero": zero})
    if zero == 0:
        four_processes.run(jobs.mesh_parity, "llama-shared", {"pp": 2, "tp": 2}, torch.float64, MODE)


@pytest.mark.sweep
def test_weights_dropout_and_losses_do_not_depend_on_the_mesh(two_processes, four_processes):
    first = two_processes.run(jobs.from_meta, {"dp": 2}, {"zero": 0})[0]
    assert len(set(first)) == 3
    meshes = [
        ({"dp": 2, "tp": 2}, {"zero": 1, "num_microbatches": 2, **MODE}),
        ({"pp": 2, "dp": 2}, {"zero": 2, "schedule": "zbv", "num_microbatches": 4}),
        ({"pp": 2, "tp": 2}, {"num_microbatches": 4, "recompute": "full", **MODE}),
        ({"dp_replicate": 2, "dp": 2}, {"zero": 3}),
    ]
    for axes, options in meshes:
        for losses in four_processes.run(jobs.from_meta, axes, options):
            assert losses == pytest.approx(first, rel=2e-6), (axes, losses, first)
