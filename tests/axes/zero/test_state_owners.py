"""An optimizer's state dict is loaded by the rank that saved it; another rank's shards are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelize import ModelError, build_mesh, parallelize_model
from tests.support.models import tiny_batch, tiny_model
from tests.support.refused import refused
from tests.support.threads import run_ranks

IDS, LABELS = tiny_batch(vocab_size=68, length=8)
MODEL = tiny_model("llama", torch.float64, vocab_size=68)  # which two ranks divide evenly
SHARDED = [({"tp": 2}, 0), ({"dp": 2}, 1), ({"dp": 2}, 2), ({"dp": 2}, 3), ({"dp_replicate": 2, "dp_shard": 2}, 3)]
WHOLE = [({"dp": 2}, 0), ({"cp": 2}, 0)]


def _trained(axes: dict[str, int], zero: int) -> Any:
    parallel = parallelize_model(copy.deepcopy(MODEL), build_mesh("cpu", **axes), zero=zero)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=0.01)
    parallel.step(input_ids=IDS, targets=LABELS)
    optimizer.step()
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, optimizer.state_dict())
    return optimizer, states


@pytest.mark.parametrize(("axes", "zero"), SHARDED, ids=str)
def test_shards_of_another_rank_are_refused(axes, zero):
    def body(rank: int) -> None:
        optimizer, states = _trained(axes, zero)
        optimizer.load_state_dict(states[rank])
        other = rank ^ 1  # of two replicas of four ranks, the one along the axis that is sharded
        with refused(ModelError, "state-of-other-rank", "Checkpointer"):
            optimizer.load_state_dict(states[other])
        if len(states) == 4:
            optimizer.load_state_dict(states[(rank + 2) % 4])

    run_ranks(4 if len(axes) == 2 else 2, body)


@pytest.mark.parametrize(("axes", "zero"), WHOLE, ids=str)
def test_a_state_that_every_rank_has_is_loaded_on_all(axes, zero):
    def body(rank: int) -> None:
        optimizer, states = _trained(axes, zero)
        optimizer.load_state_dict(states[0])

    run_ranks(2, body)
