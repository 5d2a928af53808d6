"""Mistakes with process groups and mesh axes, each by its slug."""

from __future__ import annotations

import pytest

from parallelize import MeshError, group_for, parallelize_module
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.comm.groups import Group
from parallelize.state.records import record_of
from tests.support.refused import RULES, Block, refused, small_mesh


def test_a_group_that_does_not_exist():
    with small_mesh(tp=2), refused(MeshError, "no-such-group", "'gone'"):
        Group.by_key("0:gone")


def test_a_group_that_was_destroyed():
    with small_mesh(tp=2) as mesh:
        key = Group(mesh.get_group()).key
    with refused(MeshError, "no-such-group", key.partition(":")[2]):
        Group.by_key(key)


def test_the_group_of_other_ranks():
    with small_mesh(tp=4), refused(MeshError, "not-in-group", "rank 0", "[1, 3]"):
        group_for([1, 3])


def test_ranks_in_an_order_that_this_torch_cannot_keep(monkeypatch):
    monkeypatch.setattr(private_groups, "orders_groups", lambda: False)
    with small_mesh(tp=4), refused(MeshError, "unsorted-group", "[2, 0]"):
        group_for([2, 0])


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "pp": 2}])
def test_a_plan_on_a_mesh_without_tp(sizes):
    block = Block()
    with small_mesh(**sizes) as mesh, refused(MeshError, "no-tp-axis", "dp=2", "tp=4"):
        parallelize_module(block, mesh, RULES)
    assert record_of(block) is None and "forward" not in vars(block)
