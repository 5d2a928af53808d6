"""Initializers that a user runs on a planned model: refused where every shard would get the same numbers."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parallelize import ModelError, build_mesh, parallelize_model, parallelize_module
from parallelize.state.randomness.init.initialize import initialize
from tests.support.models import tiny_model
from tests.support.threads import run_ranks


class Block(nn.Module):
    """Two linears, and an initializer of its own for both."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up.weight)
        nn.init.normal_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x)))


STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}
KEPT = {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
WORDS = {"up": "colwise", "down": "rowwise", "norm": "replicate"}


@pytest.mark.parametrize("plan", [STYLES, KEPT, WORDS], ids=["styles", "styles that return DTensors", "plan"])
def test_reset_parameters_of_sharded_modules_is_refused(plan):
    def body(rank: int) -> None:
        block = parallelize_module(Block(), build_mesh("cpu", tp=2), plan)
        before = block.up.weight.to_local().clone()
        for module in (block, block.up, block.down, copy.deepcopy(block).up):
            with pytest.raises(ModelError) as error:
                module.reset_parameters()
            assert error.value.slugs == ("initializer-on-shards",) and "initialize(model, seed)" in str(error.value)
        assert torch.equal(block.up.weight.to_local(), before)
        block.norm.reset_parameters()  # constants are the same on every rank

    run_ranks(2, body)


def test_initializers_of_libraries_are_refused_and_initialize_is_not():
    models = [tiny_model("llama") for _ in range(2)]

    def body(rank: int) -> torch.Tensor:
        model = parallelize_module(models[rank], build_mesh("cpu", tp=2))
        with pytest.raises(ModelError) as error:
            model.apply(model._init_weights)
        assert error.value.slugs == ("initializer-on-shards",)
        initialize(model, 3)
        return model.model.layers[0].mlp.up_proj.weight.to_local().detach()

    assert not torch.equal(*run_ranks(2, body))


def test_full_weights_and_one_rank_are_initialized_as_always():
    block = run_ranks(1, lambda rank: parallelize_module(Block(), build_mesh("cpu", tp=1), WORDS))[0]
    before = block.up.weight.to_local().clone()
    block.reset_parameters()
    block.up.reset_parameters()
    assert not torch.equal(block.up.weight.to_local(), before)


DRAWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_": nn.init.normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "method": lambda weight: weight.normal_(),
    "uniform_": lambda weight: weight.uniform_(),
    "exponential_": lambda weight: weight.exponential_(),
    "bernoulli_": lambda weight: weight.bernoulli_(0.5),
    "data": lambda weight: weight.data.normal_(),
    "empty_like": lambda weight: torch.empty_like(weight).normal_(),
    "noise": lambda weight: weight.add_(torch.randn_like(weight)),
    "uniform noise": lambda weight: weight.add_(torch.rand_like(weight)),
    "integers": lambda weight: torch.randint_like(weight, 3),
}


@pytest.mark.parametrize("plan", [STYLES, KEPT, WORDS], ids=["styles", "styles that return DTensors", "plan"])
def test_draws_into_sharded_parameters_are_refused_and_others_are_not(plan):
    def body(rank: int) -> None:
        mesh = build_mesh("cpu", tp=2)
        block = parallelize_module(Block(), mesh, plan)
        before = block.up.weight.to_local().clone()
        other = distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])
        with torch.no_grad():
            for draw in DRAWS.values():
                with pytest.raises(ModelError) as error:
                    draw(block.up.weight)
                assert error.value.slugs == ("initializer-on-shards",) and "initialize(model, seed)" in str(error.value)
            for name in ("normal_", "uniform_", "noise"):
                DRAWS[name](other)  # of this shape the model has none
        assert torch.equal(block.up.weight.to_local(), before) and bool(other.to_local().any())
        with torch.no_grad(), pytest.raises(ModelError):
            block.up.bias.uniform_()
        nn.init.normal_(block.norm.weight)
        nn.init.constant_(block.up.weight, 2.0)
        assert bool((block.up.weight.to_local() == 2).all())

    run_ranks(2, body)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_draws_into_parameters_that_zero_3_shards_are_refused(axes):
    base = Block()

    def body(rank: int) -> None:
        parallel = parallelize_model(copy.deepcopy(base), build_mesh("cpu", **axes), WORDS, zero=3)
        with torch.no_grad():
            for draw in (nn.init.normal_, torch.randn_like):
                with pytest.raises(ModelError) as error:
                    draw(parallel.module.norm.weight)
                assert error.value.slugs == ("initializer-on-shards",)

    run_ranks(2 * axes.get("tp", 1), body)


def test_draws_into_a_dropped_model_are_pytorchs_again():
    def body(rank: int) -> None:
        mesh = build_mesh("cpu", tp=2)
        model = parallelize_module(
            nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)), mesh, {"0": "colwise", "1": "rowwise"}
        )
        placements = model[0].weight.placements
        del model
        dist.barrier()
        if rank == 0:
            gc.collect()  # of the other thread's model too: a second collection at the same time does nothing
        dist.barrier()
        torch.rand_like(distribute_tensor(torch.zeros(10, 6), mesh, placements))

    run_ranks(2, body)
