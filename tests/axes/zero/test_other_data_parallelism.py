"""PyTorch's own data parallelism and `shard_data` exclude each other, by one message."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from parallelize import ParallelizeError, build_mesh, parallelize_model, parallelize_module, shard_data
from tests.support.refused import RULES, WIDTH, Block

AXES = {"planned": {"tp": 2}, "planned, dp": {"dp": 2, "tp": 1}, "ZeRO 0": {"dp": 2}, "ZeRO 1": {"dp": 2}}


class Wrapper(nn.Module):
    """As trainers wrap a model."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)


def _prepared(kind: str) -> nn.Module:
    torch.manual_seed(0)
    mesh = build_mesh("cpu", **AXES[kind])
    if kind.startswith("planned"):
        return parallelize_module(Block(), mesh, RULES)
    return parallelize_model(Block(), mesh, zero=int(kind[-1])).module


def _run(wrap: Any, model: nn.Module) -> str:
    try:
        wrap(model)(torch.randn(3, WIDTH)).sum().backward()
    except ParallelizeError as error:
        assert "shard_data" in str(error)
        assert all(parameter.grad is None for parameter in model.parameters())
        return error.slugs[0]
    return "accepted"


def wrapped(rank: int, kind: str) -> dict[str, str]:
    wraps = {
        "ddp": DistributedDataParallel,
        "ddp of a wrapper": lambda model: DistributedDataParallel(Wrapper(model)),
        "replicate": replicate,
    }
    if kind.startswith("planned"):
        del wraps["ddp of a wrapper"]  # PyTorch refuses DTensors there
    return {name: _run(wrap, _prepared(kind)) for name, wrap in wraps.items()}


def wrapped_before(rank: int) -> dict[str, str]:
    torch.manual_seed(0)
    outcomes, initial = {}, Block()
    mesh = build_mesh("cpu", dp=2)
    wraps = {
        "ddp": DistributedDataParallel,
        "ddp inside": lambda model: Wrapper(DistributedDataParallel(model)),
        "replicate": replicate,
        "fully_shard": lambda model: fully_shard(model, mesh=mesh["dp"]),
    }
    for name, wrap in wraps.items():
        for function in (shard_data, parallelize_model, parallelize_module):
            options: dict[str, Any] = {"parallelize_plan": RULES} if function is parallelize_module else {}
            on = build_mesh("cpu", tp=2) if function is parallelize_module else mesh
            model = wrap(copy.deepcopy(initial))
            try:
                function(model, on, **options)
                outcomes[f"{name}, {function.__name__}"] = "accepted"
            except ParallelizeError as error:
                outcomes[f"{name}, {function.__name__}"] = error.slugs[0]
    return outcomes


@pytest.mark.processes
@pytest.mark.parametrize("kind", AXES)
def test_no_wrapper_of_pytorch_around_it(two_processes, kind):
    for outcomes in two_processes.run(wrapped, kind):
        assert set(outcomes.values()) == {"other-data-parallel"}, outcomes


@pytest.mark.processes
def test_a_model_that_pytorch_wraps_already(two_processes):
    for outcomes in two_processes.run(wrapped_before):
        expected = {name: slug for name, slug in outcomes.items() if "parallelize_module" not in name}
        assert set(expected.values()) == {"other-data-parallel"}, outcomes
        assert "accepted" not in outcomes.values(), outcomes
