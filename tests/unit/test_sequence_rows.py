"""Which rows each rank of cp holds, and which tiles that leaves to compute."""

from __future__ import annotations

import itertools

import pytest

from parallelize.context.rows import SequenceRows, count, cut
from parallelize.ops.tiles import tiles


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("full", [0, 1, 5, 12, 13, 64, 101])
def test_every_row_has_one_rank(full, ring, ulysses, balanced):
    rows = SequenceRows(full, ring, ulysses, balanced)
    held = [row for rank in range(rows.size) for start, stop in rows.of_rank(rank) for row in range(start, stop)]
    assert sorted(held) == list(range(full))
    assert [held[place] for place in rows.in_order()] == list(range(full))
    for place in range(ring):
        assert sum(rows.members(place)) == count(rows.of_place(place))
        runs = rows.of_place(place)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(runs)), "ascending"


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_causal_work_is_the_same_in_every_step_of_every_place(ring):
    rows = SequenceRows(16 * ring * 2, ring)
    for step in range(ring):
        work = set()
        for place in range(ring):
            found = tiles(rows.of_place(place), rows.of_place((place - step) % ring), causal=True, window=0)
            work.add(sum(_pairs(tile) for tile in found))
        assert len(work) == 1, (step, work)


def _pairs(tile):
    area = (tile.q_stop - tile.q_start) * (tile.k_stop - tile.k_start)
    return area / 2 if tile.kind == "causal" else area


@pytest.mark.parametrize("window", [0, 1, 3, 7, 50])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("full", [9, 24, 31])
def test_tiles_are_what_the_mask_lets_through(full, causal, window):
    """Full tiles hold nothing but pairs that see each other; what lies outside of all tiles sees nothing."""
    rows = SequenceRows(full, 3)
    for mine, theirs in itertools.product(range(3), repeat=2):
        own, keys = ([row for a, b in rows.of_place(place) for row in range(a, b)] for place in (mine, theirs))
        found = tiles(rows.of_place(mine), rows.of_place(theirs), causal, window if causal else 0)
        covered = {}
        for tile in found:
            for i, j in itertools.product(range(tile.q_start, tile.q_stop), range(tile.k_start, tile.k_stop)):
                assert (i, j) not in covered, "twice"
                covered[i, j] = tile.kind
        for (i, q), (j, k) in itertools.product(enumerate(own), enumerate(keys)):
            seen = not causal or (q - k >= 0 and (not window or q - k < window))
            kind = covered.get((i, j))
            assert not seen or kind, "left out"
            assert seen or kind != "full"
            assert kind != "causal" or own == keys or (q >= k) == (i - j >= _offset(found, i, j))


def _offset(found, i, j):
    tile = next(t for t in found if t.q_start <= i < t.q_stop and t.k_start <= j < t.k_stop)
    return tile.q_start - tile.k_start


def test_cutting_runs():
    assert cut(((0, 3), (10, 14)), 2, 5) == ((2, 3), (10, 12))
    assert cut(((0, 3), (10, 14)), 3, 3) == ()
    assert cut(((0, 3), (10, 14)), 0, 7) == ((0, 3), (10, 14))
