"""One timed collective an axis, and the rank that has not come to it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from parallelize import LaunchError, build_mesh
from parallelize.launch.preflight.timed_links import TimedLink, timed_links
from parallelize.tools.analysis.cost.machine import load_machine


def links(rank: int) -> list[str]:
    mesh = build_mesh("cpu", dp=2, tp=1)
    timed = timed_links(mesh, load_machine("cpu"), dist.HashStore(), {}, 30)
    return [link.axis for link in timed if link.bytes_per_s > 0]


def silent(rank: int) -> str:
    """Rank 1 does not come to the collective."""
    mesh, store = build_mesh("cpu", dp=2), dist.HashStore()
    if rank == 1:
        return ""
    try:
        timed_links(mesh, load_machine("cpu"), store, {1: "node1"}, 1)
    except LaunchError as error:
        return str(error)
    return "no error"


@pytest.mark.xdist_group("ranks")
def test_each_axis_with_several_ranks_is_timed(two_processes):
    assert two_processes.run(links) == [["dp"], ["dp"]]
    line = TimedLink("tp", 4, 1e9, 4e9).line()
    assert line.startswith("tp (4 ranks): all_reduce at 1.00 GB/s, 25% of the assumed 4.00 GB/s: slower")


@pytest.mark.sweep
@pytest.mark.xdist_group("ranks")
def test_a_rank_that_does_not_come_is_named(two_processes):
    try:
        message = two_processes.run(silent)[0]
    finally:
        two_processes.close()  # rank 0 still waits in the groups that later tests would use
    assert "link-silent" in message and "ranks 1 on node1 have not come" in message
