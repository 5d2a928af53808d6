"""Matrices are divided by cost, and stay where they are stored."""

from __future__ import annotations

from functools import partial

import pytest

from parallelize.base.boxes import full_box
from parallelize.base.errors import ModelError
from parallelize.state.optimizers.matrices import cost_of_matrix
from parallelize.state.optimizers.owners import assign_owners
from tests.support.refused import refused

COST = partial(cost_of_matrix, num_steps=5)


def rows_over(shape, ranks):
    return [((rank * shape[0] // ranks, (rank + 1) * shape[0] // ranks), (0, shape[1])) for rank in range(ranks)]


def test_no_rank_has_much_more_than_its_share():
    shapes = {f"layer.{n}": (64, 64 * (1 + n % 4)) for n in range(24)}
    stored = [{name: [rows_over(shape, 4)[rank]] for name, shape in shapes.items()} for rank in range(4)]
    owned = assign_owners([(name, full_box(shape)) for name, shape in shapes.items()], stored, COST)
    loads = [sum(COST(m.box) for m in owned if m.owner == rank) for rank in range(4)]
    assert max(loads) <= 1.1 * sum(loads) / 4
    assert all(sorted(part.sender for part in matrix.parts) == [0, 1, 2, 3] for matrix in owned)


def test_experts_stay_on_their_rank_and_send_nothing():
    shape = (4, 6, 8)
    stored = [{"experts": [((2 * rank, 2 * rank + 2), (0, 6), (0, 8))]} for rank in range(2)]
    boxes = [((n, n + 1), *full_box(shape[1:])) for n in range(4)]
    owned = {m.box[0][0]: m for m in assign_owners([("experts", box) for box in boxes], stored, COST)}
    assert [owned[n].owner for n in range(4)] == [0, 0, 1, 1]
    assert all(part.sender == m.owner and part.holders == (m.owner,) for m in owned.values() for part in m.parts)


@pytest.mark.parametrize("rows", [(0, 3), (0, 7)])
def test_a_matrix_that_shards_do_not_cover_is_refused(rows):
    stored = [{"w": [(rows, (0, 4))]}, {"w": [((5, 8), (0, 4))]}]
    with refused(ModelError, "matrix-not-covered", "w"):
        assign_owners([("w", ((0, 8), (0, 4)))], stored, COST)
