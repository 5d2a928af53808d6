"""Edits of weights between steps stay, also where the optimizer steps float32 copies of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from parallelize import Checkpointer, build_mesh, build_optimizer, load_checkpoint, parallelize_module, shard_data
from tests.support.refused import RULES, WIDTH, Block
from tests.support.threads import run_ranks


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def by_data(parameters: list[Any]) -> None:
    for parameter in parameters:
        local(parameter.data).mul_(0.5)


EDITS: dict[str, Callable[[list[Any]], Any]] = {
    "in place": lambda parameters: [parameter.mul_(0.5) for parameter in parameters],
    "foreach": lambda parameters: torch._foreach_mul_(parameters, 0.5),
    "data": by_data,
    "copied in": lambda parameters: [parameter.copy_(parameter * 0.5) for parameter in parameters],
    "some rows": lambda parameters: [local(parameter.detach())[:1].zero_() for parameter in parameters],
}


@pytest.mark.variants(every=9)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_an_edit_between_steps_stays(zero, tp, edit):
    initial = Block()
    models = [copy.deepcopy(initial) for _ in range(2 * tp)]

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2, tp=tp)
        model = parallelize_module(models[rank], mesh, RULES) if tp > 1 else models[rank]
        shard_data(model, mesh, zero, dtype=torch.bfloat16)
        optimizer = build_optimizer(model, torch.optim.SGD, lr=0.0)
        hidden = torch.randn(3, WIDTH, dtype=torch.bfloat16)
        model(hidden).sum().backward()
        optimizer.step()
        with torch.no_grad():
            EDITS[edit](list(model.parameters()))
        edited = [local(parameter).clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        model(hidden).sum().backward()
        optimizer.step()
        assert all(map(torch.equal, edited, map(local, model.parameters())))

    run_ranks(2 * tp, body)


def test_elements_that_nobody_edits_keep_the_precision_of_their_copy():
    """Steps that bfloat16 cannot show add up, although another element is edited between them."""
    initial = Block()
    models = [copy.deepcopy(initial) for _ in range(2)]

    def body(rank: int) -> None:
        model = shard_data(models[rank], build_mesh("cpu", dp=2), 1, dtype=torch.bfloat16)
        optimizer = build_optimizer(model, torch.optim.SGD, lr=1e-5)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
            with torch.no_grad():
                model.down.bias[1] = float(step)
            optimizer.step()
        expected = initial.down.bias.detach() - 4 * 2e-5
        expected[1] = 3.0 - 2e-5
        bias = optimizer.param_groups[0]["params"][-1].detach()
        assert torch.allclose(local(bias), expected[4 * rank : 4 * rank + 4], rtol=0, atol=5e-7)

    run_ranks(2, body)


def test_an_edit_is_in_the_next_checkpoint(tmp_path):
    initial = Block()
    models = [copy.deepcopy(initial) for _ in range(2)]
    resumed = [copy.deepcopy(initial) for _ in range(2)]

    def body(rank: int) -> None:
        mesh = build_mesh("cpu", dp=2)
        model = shard_data(models[rank], mesh, 1, dtype=torch.bfloat16)
        optimizer = build_optimizer(model, torch.optim.SGD, lr=0.0)
        with torch.no_grad():
            model.up.weight.mul_(0.5)
        Checkpointer(tmp_path, model, optimizer=optimizer, mesh=mesh).save(1)
        other = shard_data(resumed[rank], mesh, 1, dtype=torch.bfloat16)
        load_checkpoint(tmp_path, other, mesh=mesh)
        assert torch.equal(other.up.weight, model.up.weight)

    run_ranks(2, body)
