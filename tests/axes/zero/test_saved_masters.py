"""bfloat16 weights: PyTorch's own state dicts of model and optimizer continue a run bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

from parallelize import ModelError, build_mesh, build_optimizer, parallelize_module, shard_data
from tests.support.refused import RULES, WIDTH, Block, refused
from tests.support.threads import run_ranks


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def trained(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).pow(2).sum().backward()
        optimizer.step()
    return [local(p).clone() for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.variants(every=6)
@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "optimizer first"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_run_continues_from_state_dicts(zero, tp, optimizer_class, model_first):
    initial = Block()
    models = [copy.deepcopy(initial) for _ in range(4 * tp)]

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2, tp=tp)

        def build(number: int):
            model = models[2 * rank + number]
            model = parallelize_module(model, mesh, RULES) if tp > 1 else model
            shard_data(model, mesh, zero, dtype=torch.bfloat16)
            return model, build_optimizer(model, optimizer_class, lr=1e-4)

        model, optimizer = build(0)
        trained(model, optimizer, 3)
        saved, saved_state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        expected = trained(model, optimizer, 2)
        model, optimizer = build(1)
        trained(model, optimizer, 1)
        if model_first:
            model.load_state_dict(saved)
        optimizer.load_state_dict(saved_state)
        if not model_first:
            model.load_state_dict(saved)
        assert all(map(torch.equal, expected, trained(model, optimizer, 2)))

    run_ranks(2 * tp, body)


def test_weights_that_are_loaded_alone_are_taken_as_they_are():
    models = [Block() for _ in range(2)]

    def body(rank: int) -> None:
        model = shard_data(models[rank], build_mesh("cpu", dp=2), 1, dtype=torch.bfloat16, check_replicated=False)
        optimizer = build_optimizer(model, torch.optim.SGD, lr=1e-4)
        trained(model, optimizer, 1)
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        shards = [local(p) for group in optimizer.param_groups for p in group["params"]]
        assert all(torch.equal(shard, shard.bfloat16().float()) for shard in shards)

    run_ranks(2, body)


def test_copies_of_another_mesh():
    models = [Block() for _ in range(2)]

    def body(rank: int) -> None:
        model = shard_data(models[rank], build_mesh("cpu", dp=2), 1, dtype=torch.bfloat16, check_replicated=False)
        optimizer = build_optimizer(model, torch.optim.SGD, lr=1e-4)
        state = optimizer.state_dict()
        state["masters"] = {index: torch.zeros(1, 1) for index in state["masters"]}
        with refused(ModelError, "master-of-other-shape", "up.weight", "Checkpointer"):
            optimizer.load_state_dict(state)

    run_ranks(2, body)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_float64_parameters_with_narrower_compute_have_float64_copies(zero):
    initial = Block().double()
    models = [copy.deepcopy(initial) for _ in range(2)]

    def body(rank: int) -> None:
        model = shard_data(models[rank], build_mesh("cpu", dp=2), zero, dtype=torch.bfloat16)
        optimizer = build_optimizer(model, torch.optim.SGD, lr=0.1)
        stepped = trained(model, optimizer, 1)
        masters = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(master.dtype == torch.float64 for master in masters)
        # more digits than bfloat16 or float32 have
        for new, parameter in zip(stepped, model.parameters(), strict=True):
            assert not new.numel() or not torch.equal(new, new.float().double())
            assert parameter.dtype == torch.bfloat16

    run_ranks(2, body)
