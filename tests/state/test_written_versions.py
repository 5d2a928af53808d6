"""A step between forward and backward is the error that it is without a plan."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD, AdamW

from parallelize import build_mesh, full_state_dict, local_optimizer, parallelize_model, parallelize_module
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of
from tests.support.threads import run_ranks

OPTIMIZERS = [
    (SGD, {"foreach": True}),
    (SGD, {"foreach": False}),
    (AdamW, {"foreach": True}),
    (AdamW, {"foreach": False}),
]


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("as_local", [False, True], ids=["DTensors", "local tensors"])
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_step_between_forward_and_backward_is_refused(optimizer, options, as_local):
    stock = tiny_model("llama", torch.float64)

    def body(rank: int) -> None:
        model = parallelize_module(copy.deepcopy(stock), build_mesh("cpu", tp=2), loss_parallel=False)
        built = optimizer(model.parameters(), lr=0.1, **options)
        if as_local:
            local_optimizer(built)
        ids, labels = tiny_batch(length=8)
        loss_of(model(input_ids=ids).logits, labels).backward()
        late = loss_of(model(input_ids=ids).logits, labels)
        built.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()

    run_ranks(2, body)


def test_steps_after_each_backward_train():
    stock = tiny_model("llama", torch.float64)

    def body(rank: int) -> list[float]:
        model = parallelize_module(copy.deepcopy(stock), build_mesh("cpu", tp=2), loss_parallel=False)
        built = SGD(model.parameters(), lr=0.1)
        ids, labels = tiny_batch(length=8)
        losses = []
        for _ in range(3):
            loss = loss_of(model(input_ids=ids).logits, labels)
            loss.backward()
            built.step()
            built.zero_grad()
            losses.append(loss.item())
        return losses

    for losses in run_ranks(2, body):
        assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_assigned_data_is_written_to_the_shard(axes):
    """Under ZeRO 3 also where no plan shards anything over tp."""
    stock = tiny_model("llama", torch.float64)
    zero = 3 if "dp" in axes else 0

    def body(rank: int) -> bool:
        parallel = parallelize_model(copy.deepcopy(stock), build_mesh("cpu", **axes), zero=zero)
        for parameter in parallel.module.parameters():
            parameter.data = parameter.data * 0.5
        full = full_state_dict(parallel.module, every_rank=True)
        return all(torch.equal(full[name], value * 0.5) for name, value in stock.named_parameters())

    assert all(run_ranks(2 * len(axes), body))
