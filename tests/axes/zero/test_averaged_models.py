"""Moving averages of the weights (`AveragedModel`), which copy the model, at each ZeRO stage."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from parallelize import build_mesh, full_state_dict, next_tokens, parallelize_model
from parallelize.base.errors import ModelError
from tests.support.models import tiny_model
from tests.support.parity import worst
from tests.support.refused import refused
from tests.support.threads import run_ranks

IDS = torch.arange(1, 41).view(4, 10)


def averaged(parallel, rows):
    average = AveragedModel(parallel.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        parallel.step(input_ids=rows, targets=next_tokens(rows))
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(parallel.module)
    return full_state_dict(average.module, every_rank=True)


@pytest.mark.variants(every=1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_average_of_the_weights_at_each_stage(zero):
    base = tiny_model("llama", torch.float64)

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", dp=2), zero=zero)
        if zero < 3:
            return averaged(parallel, IDS.chunk(2)[rank])
        for module in (parallel.module, parallel.module.model.layers[0]):
            with refused(ModelError, "sharded-copy", "fully_shard", "zero=2"):
                copy.deepcopy(module)
            with refused(ModelError, "sharded-copy"):
                AveragedModel(module)
        return None

    results = run_ranks(2, body)
    alone = run_ranks(1, lambda rank: averaged(parallelize_model(copy.deepcopy(base), build_mesh("cpu", tp=1)), IDS))
    assert zero == 3 or all(worst(state, alone[0])[0] < 1e-12 for state in results)
