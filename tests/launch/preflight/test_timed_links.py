"""One timed collective an axis, and the rank that has not come to it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from parallelize import LaunchError, build_mesh
from parallelize.launch.preflight.timed_links import GPU_BYTES, TimedLink, compared, timed_links
from parallelize.tools.analysis.cost.machine import Placement, load_machine

NETWORK = [  # ranks, of these on a host, measured gathered bytes over time in GB/s
    (8, 8, 211.7), (16, 8, 193.1), (64, 8, 171.4), (256, 8, 129.8), (16, 2, 50.6), (64, 2, 48.4),
]  # fmt: skip
"""All-reduces of 1 GiB between H100s, 8 a node, with a card of 400 Gbit/s each. Source: autoparallel of Meta,
`h100_nvswitch_roce_400g.py`."""


def links(rank: int) -> list[tuple[str, int]]:
    """(axis, the most ranks of a group on a host), first on one host and then on two."""
    mesh, machine = build_mesh("cpu", dp=2, tp=1), load_machine("cpu")
    on_one, on_two = {0: "node0", 1: "node0"}, {0: "node0", 1: "node1"}
    timed = [link for hosts in (on_one, on_two) for link in timed_links(mesh, machine, dist.HashStore(), hosts, 30)]
    return [(link.axis, link.in_node) for link in timed if link.bytes_per_s > 0]


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
    assert two_processes.run(links) == [[("dp", 2), ("dp", 1)]] * 2
    line = TimedLink("tp", 4, 4, 1e9, 4e9).line()
    assert line.startswith("tp (4 ranks): all_reduce at 1.00 GB/s, 25% of the assumed 4.00 GB/s: slower")
    line = TimedLink("dp", 4, 2, 3e9, 4e9).line()
    assert line == "dp (4 ranks, 2 on a host): all_reduce at 3.00 GB/s, 75% of the assumed 4.00 GB/s"


@pytest.mark.parametrize(("ranks", "in_node", "rate"), NETWORK)
def test_a_healthy_network_is_not_called_slow_and_one_three_times_slower_is(ranks, in_node, rate):
    machine, placement, size = load_machine("h100-sxm"), Placement(ranks, in_node), 2**30
    seconds = size / (rate * 1e9)
    assert not compared("dp", machine, placement, size, seconds).is_slow
    assert compared("dp", machine, placement, size, 3 * seconds).is_slow


def test_a_wide_axis_is_compared_with_all_of_its_cards_and_with_its_start_up():
    machine = load_machine("h100-sxm")
    wide, narrow = (compared("dp", machine, Placement(64, in_node), GPU_BYTES, 1.0) for in_node in (8, 1))
    assert wide.assumed > 4 * narrow.assumed
    one_card = GPU_BYTES * 2 / 45e9  # all traffic of a host through one of its eight cards
    assert compared("dp", machine, Placement(64, 8), GPU_BYTES, one_card).is_slow
    far = compared("dp", machine, Placement(2048, 8), GPU_BYTES, 1.0)
    assert far.assumed < wide.assumed  # the message is as large, and more ranks take longer to start


@pytest.mark.sweep
@pytest.mark.xdist_group("ranks")
def test_a_rank_that_does_not_come_is_named(two_processes):
    try:
        message = two_processes.run(silent)[0]
    finally:
        two_processes.close()  # rank 0 still waits in the groups that later tests would use
    assert "link-silent" in message and "ranks 1 on node1 have not come" in message
