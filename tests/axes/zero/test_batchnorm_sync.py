"""Running statistics of normalizations over data axes: one value on all ranks after each step, that of the first
rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parallelize import accumulate_gradients, build_mesh, shard_data
from tests.support.threads import run_ranks

WIDTH = 6


@pytest.mark.variants(every=3)
@pytest.mark.parametrize("late", [False, True], ids=["each backward", "accumulated"])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_batch_norm_after_training_steps(zero, axes, late):
    torch.manual_seed(0)
    initial = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.BatchNorm1d(WIDTH)).double()
    world = 2 if "dp" in axes else 4
    models, first = [copy.deepcopy(initial) for _ in range(world)], copy.deepcopy(initial)
    inputs = torch.randn(world, 3, 2, 4, WIDTH, dtype=torch.float64)

    def train(model: nn.Module, rank: int) -> None:
        for step in inputs[rank]:
            if late and model is not first:
                with accumulate_gradients(model):
                    for microbatch in step:
                        model(microbatch).sum().backward()
            else:
                for microbatch in step:
                    model(microbatch).sum().backward()

    train(first, 0)

    def body(rank: int) -> None:
        model = shard_data(models[rank], build_mesh("cpu", **axes), zero)
        train(model, rank)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, dict(first.named_buffers())[name], rtol=1e-12, atol=1e-12)

    run_ranks(world, body)
