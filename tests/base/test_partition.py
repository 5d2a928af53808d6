"""Costs in parts: each is in one part, as many in each where they must be, and the largest sum is near the best."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelize.base.partition import balance_of, balanced_parts, best_balance

COSTS = st.lists(st.integers(1, 10**6).map(float), min_size=1, max_size=60)


def sums(costs, parts):
    return [sum(costs[n] for n in part) for part in parts]


@given(COSTS, st.integers(1, 12))
def test_any_number_in_each_part(costs, count):
    parts = balanced_parts(costs, count)
    assert sorted(itertools.chain(*parts)) == list(range(len(costs))) and len(parts) == count
    assert sum(map(bool, parts)) == min(count, len(costs)), "no part is empty where there are enough"
    largest = max(sums(costs, parts))
    # Graham's bound for the largest first: 4/3 of the best, which is no less than the mean and the largest cost
    ordered = sorted(costs, reverse=True)
    least = max(sum(costs) / count, *(ordered[:1]), sum(ordered[count - 1 : count + 1]) if len(costs) > count else 0)
    assert largest <= least * 4 / 3 + 1e-6
    assert balance_of(sums(costs, parts)) <= best_balance(costs, count) + 1e-12
    assert parts == balanced_parts(list(costs), count), "every rank gets the same"


@given(COSTS, st.integers(1, 6))
def test_as_many_in_each_part(costs, count):
    costs = costs * count
    parts = balanced_parts(costs, count, equal=True)
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    assert {len(part) for part in parts} == {len(costs) // count}


@pytest.mark.parametrize(
    ("costs", "count", "equal", "expected"),
    [
        ([8, 7, 6, 5, 4], 2, False, [15, 15]),  # largest first alone makes 17 and 13
        ([9, 1, 1, 1, 1, 1, 1, 1, 1, 1], 2, False, [9, 9]),
        ([9, 1, 1, 1], 2, True, [10, 2]),
        ([4, 4, 3, 3, 2, 2], 3, True, [6, 6, 6]),
        ([5], 3, False, [5, 0, 0]),
    ],
)
def test_known_partitions(costs, count, equal, expected):
    assert sums(costs, balanced_parts(costs, count, equal=equal)) == expected


@given(st.lists(st.integers(1, 40), min_size=4, max_size=8), st.integers(2, 3))
def test_small_ones_are_near_the_best_of_all(costs, count):
    best = min(
        max(sum(c for c, part in zip(costs, choice, strict=True) if part == p) for p in range(count))
        for choice in itertools.product(range(count), repeat=len(costs))
    )
    assert max(sums(costs, balanced_parts(costs, count))) <= best * 1.2 + 1
    assert best_balance(costs, count) >= sum(costs) / count / best - 1e-12, "no better balance exists"


def test_a_change_of_two_costs_is_found():
    """The largest part gives one of its costs for a smaller one, though none of them may go alone."""
    costs = [10.0, 9.0, 8.0, 7.0] + [6.0] * 2
    assert max(sums(costs, balanced_parts(costs, 3, equal=True))) == 16
