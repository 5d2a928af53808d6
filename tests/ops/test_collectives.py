"""The collectives of layers change no input, and are the identity on one rank. Their numbers and gradients:
test_local_collectives.py."""

from __future__ import annotations

import torch
import torch.distributed as dist

from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from tests.support.threads import run_ranks


def world() -> Group:
    return Group(dist.group.WORLD)


def test_inputs_are_unchanged_and_a_group_of_one_sends_nothing():
    def body(rank: int) -> None:
        group = world()
        x = torch.arange(12.0).view(3, 4)
        for function in (
            lambda: ops.copy(x, group),
            lambda: ops.reduce(x, group),
            lambda: ops.gather(x, group, 0, 3 * group.size, "partial"),
            lambda: ops.reduce_scatter(x, group, 1),
            lambda: ops.split(x, group, 0),
            lambda: ops.all_to_all(x, group, 0, 1, 4 * group.size),
        ):
            before = x.clone()
            function()
            assert torch.equal(x, before)

    run_ranks(2, body)

    def one_rank(rank: int) -> None:
        group, x = world(), torch.arange(12.0).view(3, 4)
        group.pg = None  # any collective would fail
        outs = [
            ops.copy(x, group),
            ops.reduce(x, group),
            ops.sum_both(x, group),
            ops.gather(x, group, 0, 3, "partial"),
            ops.reduce_scatter(x, group, 1),
            ops.split(x, group, 0),
            ops.all_to_all(x, group, 0, 1, 4),
        ]
        assert all(out is x for out in outs)

    run_ranks(1, one_rank)
