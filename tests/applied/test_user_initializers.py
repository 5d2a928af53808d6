"""Initializers that a user runs on a planned model: refused where every shard would get the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parallelize import ModelError, build_mesh, parallelize_module
from parallelize.randomness.init.initialize import initialize
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
