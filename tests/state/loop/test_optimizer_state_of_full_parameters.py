"""The state of an optimizer of full parameters is not loaded into one that steps on shards."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import ShapeError, build_mesh, parallelize_model
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

IDS, LABELS = tiny_batch()


@pytest.mark.parametrize(("axes", "zero"), [({"tp": 2}, 0), ({"dp": 2}, 1), ({"dp": 2}, 2), ({"dp": 2}, 3)])
def test_it_is_refused_when_it_is_loaded(axes, zero):
    stock = tiny_model("llama", torch.float64)
    models = [copy.deepcopy(stock) for _ in range(2)]
    alone = torch.optim.AdamW(stock.parameters(), lr=1e-3)
    stock(input_ids=IDS, labels=LABELS).loss.backward()
    alone.step()
    state = alone.state_dict()

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", **axes), zero=zero)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=2e-3)
        with pytest.raises(ShapeError) as error:
            optimizer.load_state_dict(copy.deepcopy(state))
        assert error.value.slugs == ("full-optimizer-state",)
        assert not optimizer.state and optimizer.param_groups[0]["lr"] == 2e-3
        parallel.step(input_ids=IDS, targets=LABELS)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())

    run_ranks(2, body)


def test_where_every_rank_has_full_parameters_it_is_loaded():
    stock = tiny_model("llama", torch.float64)
    models = [copy.deepcopy(stock) for _ in range(2)]
    alone = torch.optim.AdamW(stock.parameters(), lr=1e-3)
    for _ in range(2):
        stock(input_ids=IDS, labels=LABELS).loss.backward()
        alone.step()
        state = copy.deepcopy(alone.state_dict())

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", dp=2), zero=0)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
        optimizer.load_state_dict(copy.deepcopy(state))
        first = optimizer.param_groups[0]["params"][0]
        assert torch.equal(optimizer.state[first]["exp_avg"], state["state"][0]["exp_avg"])

    run_ranks(2, body)
