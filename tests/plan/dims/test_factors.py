"""The algebra of factors: what is unified is one axis, and views divide dims as einops would."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallelize.plan.dims.factors import Factor, divide, leaves, new_dim, regroup, size_of, unify

SIZES = st.lists(st.integers(2, 5), min_size=1, max_size=4)
few = settings(max_examples=60)


def sizes_of(dim):
    return [factor.size for factor in leaves(dim)]


def test_a_dim_of_size_1_has_no_factors():
    assert new_dim(1) == [] and size_of(new_dim(1)) == 1 and unify([], [])


def test_a_factor_that_was_divided_stands_for_its_parts():
    dim = new_dim(24)
    slow, fast = divide(dim[0], 4, 6)
    middle = divide(fast, 2, 3)
    assert leaves(dim) == [slow, *middle] and size_of(dim) == 24


def test_dims_of_one_size_become_one_axis():
    a, b, c = new_dim(12), new_dim(12), new_dim(12)
    assert unify(a, b) and unify(b, c)
    assert leaves(a) == leaves(b) == leaves(c)
    divide(leaves(c)[0], 3, 4)
    assert sizes_of(a) == [3, 4] and leaves(a) == leaves(b)


@pytest.mark.parametrize(
    ("first", "second", "fits", "sizes"),
    [
        ([12], [3, 4], True, [3, 4]),
        ([3, 4], [12], True, [3, 4]),
        ([2, 6], [4, 3], True, [2, 2, 3]),
        ([6, 4], [2, 12], True, [2, 3, 4]),
        ([2, 3], [3, 2], False, None),
        ([4, 6], [6, 4], False, None),
        ([2, 3], [2], False, None),  # of two sizes
    ],
)
def test_factors_fit_or_not(first, second, fits, sizes):
    a, b = [Factor(size) for size in first], [Factor(size) for size in second]
    assert unify(a, b) is fits
    if fits:
        assert sizes_of(a) == sizes == sizes_of(b) and leaves(a) == leaves(b)


@pytest.mark.parametrize(
    ("sizes", "view", "expected"),
    [
        ([2, 5, 12], [10, 3, 4], [[2, 5], [3], [4]]),
        ([2, 12], [2, 1, 12, 1], [[2], [], [12], []]),
        ([2, 3, 4], [24], [[2, 3, 4]]),
        ([4, 6], [2, 12], [[2], [2, 6]]),
        ([2, 3], [3, 2], None),
        ([4], [2], None),
        ([4], [8], None),
    ],
)
def test_views(sizes, view, expected):
    dims = regroup([Factor(size) for size in sizes], view)
    assert dims == expected if expected is None else [sizes_of(dim) for dim in dims] == expected


@few
@given(SIZES, st.data())
def test_a_view_and_the_view_back_are_the_same_dims(sizes, data):
    factors = [Factor(size) for size in sizes]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1)))) if len(sizes) > 1 else []
    bounds = [0, *cuts, len(sizes)]
    merged = regroup(factors, [prod(sizes[a:b]) for a, b in pairwise(bounds)])
    back = regroup([factor for dim in merged for factor in dim], sizes)
    assert [leaves(dim) for dim in back] == [[factor] for factor in factors]


@few
@given(SIZES, SIZES)
def test_what_fits_has_the_same_leaves_and_keeps_its_size(first, second):
    a = [Factor(size) for size in first]
    b = [Factor(size) for size in second]
    if unify(a, b):
        assert leaves(a) == leaves(b)
        assert unify(b, a)  # nothing is left to do
    assert (prod(sizes_of(a)), prod(sizes_of(b))) == (prod(first), prod(second))


@few
@given(SIZES)
def test_order_tells_axes_apart(sizes):
    """Two factors in the other order are another axis, also where their sizes are equal."""
    factors = [Factor(size) for size in (2, *sizes)]
    view = regroup(factors, [prod(sizes) * 2])[0]
    assert leaves(view) == factors and leaves(list(reversed(view))) != factors
