"""A group is as fast as the cards that it has in each node; an all-to-all pays for what leaves the node."""

from __future__ import annotations

import pytest

from parallelize.base.mesh import MeshSpec
from parallelize.tools.analysis.cost.machine import load_machine
from parallelize.tools.analysis.record.trace_data import Message

MACHINE = load_machine("h100-sxm")
CARD, INSIDE = MACHINE.between.reached, MACHINE.inside.reached


@pytest.mark.parametrize(("in_node", "rate"), [(1, CARD), (2, 2 * CARD), (4, 4 * CARD), (8, min(INSIDE, 8 * CARD))])
def test_cards_of_a_node_work_in_parallel(in_node, rate):
    spec = MeshSpec([("dp", 4), ("tp", 8)]) if in_node == 1 else MeshSpec([("dp", 4 * in_node), ("tp", 8 // in_node)])
    placement = MACHINE.placement(spec, "dp")
    assert (placement.in_node, placement.nodes) == (in_node, 4)
    assert MACHINE.reached("all_gather", placement) == pytest.approx(rate)


def test_a_group_in_a_node_uses_its_links():
    assert MACHINE.reached("all_reduce", MACHINE.placement(MeshSpec(dp=4, tp=8), "tp")) == INSIDE


def test_an_all_to_all_bills_what_leaves_the_node():
    spec, size = MeshSpec([("dp", 1), ("ep", 16)]), 1 << 30
    seconds = MACHINE.message_s(Message("all_to_all", "ep", 16, size, "", "forward"), spec)
    leaving = size * 8 / 16
    assert seconds == pytest.approx(leaving / CARD, rel=0.01)


def test_start_up_grows_with_the_ranks_of_a_ring():
    small, large = (
        MACHINE.message_s(Message("all_gather", "dp", ranks, 8, "", "forward"), MeshSpec(dp=ranks))
        for ranks in (16, 256)
    )
    assert large > small + 200e-6
