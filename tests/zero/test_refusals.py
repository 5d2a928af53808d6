"""Mistakes with the data axes of a mesh, each by its slug."""

from __future__ import annotations

import pytest
import torch

from parallelize import ModelError, shard_data
from tests.support.refused import WIDTH, Block, refused, small_mesh


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_data_axes_applied_twice(zero):
    with small_mesh(dp=2) as mesh:
        block = shard_data(Block(), mesh, zero)
        with refused(ModelError, "data-axes-taken", "shard_data"):
            shard_data(block, mesh, zero)


@pytest.mark.parametrize("zero", [0, 2])
def test_a_parameter_that_is_unfrozen_afterwards(zero):
    block = Block()
    block.up.weight.requires_grad_(False)
    with small_mesh(dp=2) as mesh:
        shard_data(block, mesh, zero)
        block.up.weight.requires_grad_()
        with refused(ModelError, "unmanaged-parameter", "up.weight", "frozen"):
            block(torch.randn(3, WIDTH)).sum().backward()


def test_a_unit_that_no_module_matches():
    block = Block()
    with small_mesh(dp=2) as mesh, refused(ModelError, "unmatched-unit", "'dwon'", "`down`"):
        shard_data(block, mesh, 3, units=["up", "dwon"])


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_cast_after_buffers_were_made(zero):
    with small_mesh(dp=2) as mesh:
        block = shard_data(Block(), mesh, zero).double()
        with refused(ModelError, "cast-after-sharding", "up.weight", "float64", "float32", "before shard_data"):
            block(torch.randn(3, WIDTH, dtype=torch.float64))
