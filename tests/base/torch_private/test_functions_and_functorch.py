"""Collectives are called without functorch's preparations, and its transforms are refused as by any Function of
PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from tests.support.threads import run_ranks


def test_transforms_are_refused():
    def body(rank: int) -> str:
        group = Group(dist.group.WORLD)
        with pytest.raises(RuntimeError, match="functorch transforms") as error:
            torch.func.grad(lambda x: ops.reduce(x, group).sum())(torch.ones(3))
        return str(error.value)

    assert all(run_ranks(2, body))
