"""Copies of folded experts that ZeRO splits: on which dim, and what PyTorch makes of their DTensors."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from parallelize import build_mesh, parallelize_module
from parallelize.base.layout import Chunk, packed, repeated, tiled
from parallelize.plan.parameter_shards import expert_zero_dim
from tests.axes.zero import expert_shard_jobs as jobs
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

SCALE = torch.arange(6.0, dtype=torch.float64).view(6, 1, 1)


def test_zero_3_splits_a_dim_that_ep_and_etp_do_not():
    whole = repeated((8, 12, 10), 0, 4, 4)
    assert expert_zero_dim(whole, 3) == 1 and expert_zero_dim(whole, 5) == 2 and expert_zero_dim(whole, 7) == 0
    assert expert_zero_dim(tiled(packed((8, 12, 10), 1, 2, [Chunk(12)]), 4, 2), 2) == 2
    assert expert_zero_dim(tiled(packed((8, 12, 10), 2, 2, [Chunk(10)]), 4, 2), 2) == 1
    assert expert_zero_dim(repeated((8,), 0, 4, 4), 2) == 0


@pytest.mark.variants(every=9)
@pytest.mark.parametrize("sizes", [{"ep": 2}, {"etp": 2}, {"ep": 2, "etp": 2}], ids=str)
@pytest.mark.parametrize("zero", [3, 2, 1])
@pytest.mark.parametrize("experts", [6, 2])
def test_what_pytorch_reads_and_saves(four_processes, tmp_path, experts, zero, sizes):
    """Under ZeRO 3 no shard is strided. Of two experts over `ep`, each rank has one, which dim 0 could not split."""
    options = {**sizes, "zero": zero}
    for results in four_processes.run(jobs.experts_in_torch, experts, options, str(tmp_path)):
        for name, (placements, equal) in results.items():
            assert equal == (True, True, True), name
            assert zero < 3 or "_StridedShard" not in placements, name


def test_operations_on_experts_that_are_split_give_those_of_the_full_tensor():
    """Two dims are sharded, so that a mean over the experts is not one over local rows."""
    models = [tiny_model("mixtral", torch.float64) for _ in range(4)]
    full = models[0].get_parameter(jobs.EXPERTS + "gate_up_proj").detach().clone()

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=4), ep=2, etp=2)
        stored = models[rank].get_parameter(jobs.EXPERTS + "gate_up_proj").detach()
        scale = DTensor.from_local(SCALE, stored.device_mesh, [Replicate()], run_check=False)
        results = stored.mean(0), torch.linalg.vector_norm(stored), stored * 2, stored * scale
        return [value.full_tensor() for value in results]

    expected = full.mean(0), full.norm(), full * 2, full * SCALE
    for results in run_ranks(4, body):
        for actual, wanted in zip(results, expected, strict=True):
            assert float((actual - wanted).abs().max()) <= 1e-14 * max(1.0, float(wanted.abs().max()))
