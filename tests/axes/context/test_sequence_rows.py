"""Which tokens each rank of cp stores, and which tiles that leaves to compute."""

from __future__ import annotations

import itertools

import pytest

from parallelize.axes.context.sequence_shards import SequenceLayout, count, slice_runs
from parallelize.ops.attention.ring_tiles import tiles


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("full", [0, 1, 5, 12, 13, 64, 101])
def test_every_token_has_one_rank(full, ring, ulysses, balanced):
    layout = SequenceLayout(full, ring, ulysses, balanced)
    gathered = [i for rank in range(layout.size) for start, stop in layout.of_rank(rank) for i in range(start, stop)]
    assert sorted(gathered) == list(range(full))
    assert [gathered[index] for index in layout.gathered_order()] == list(range(full))
    for ring_rank in range(ring):
        runs = layout.of_ring_rank(ring_rank)
        assert sum(layout.ulysses_sizes(ring_rank)) == count(runs)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(runs)), "ascending"


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_causal_work_is_the_same_in_every_step_on_every_rank(ring):
    layout = SequenceLayout(16 * ring * 2, ring)
    for step in range(ring):
        work = set()
        for rank in range(ring):
            queries, keys = layout.of_ring_rank(rank), layout.of_ring_rank((rank - step) % ring)
            work.add(sum(_pairs(tile) for tile in tiles(queries, keys, causal=True, window=0)))
        assert len(work) == 1, (step, work)


def _pairs(tile):
    area = (tile.q_stop - tile.q_start) * (tile.k_stop - tile.k_start)
    return area / 2 if tile.kind == "causal" else area


@pytest.mark.parametrize("window", [0, 1, 3, 7, 50])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("full", [9, 24, 31])
def test_tiles_contain_every_pair_that_the_mask_allows(full, causal, window):
    """A full tile contains no masked pair; a pair outside all tiles is masked."""
    layout = SequenceLayout(full, 3)
    for ring_rank, key_rank in itertools.product(range(3), repeat=2):
        runs, key_runs = layout.of_ring_rank(ring_rank), layout.of_ring_rank(key_rank)
        queries, keys = ([i for a, b in part for i in range(a, b)] for part in (runs, key_runs))
        tiling = tiles(runs, key_runs, causal, window if causal else 0)
        covered = {}
        for tile in tiling:
            for i, j in itertools.product(range(tile.q_start, tile.q_stop), range(tile.k_start, tile.k_stop)):
                assert (i, j) not in covered, "twice"
                covered[i, j] = tile.kind
        for (i, q), (j, k) in itertools.product(enumerate(queries), enumerate(keys)):
            allowed = not causal or (q - k >= 0 and (not window or q - k < window))
            kind = covered.get((i, j))
            assert not allowed or kind, "missing"
            assert allowed or kind != "full"
            assert kind != "causal" or queries == keys or (q >= k) == (i - j >= _offset(tiling, i, j))


def _offset(tiling, i, j):
    tile = next(t for t in tiling if t.q_start <= i < t.q_stop and t.k_start <= j < t.k_stop)
    return tile.q_start - tile.k_start


def test_slices_of_runs():
    assert slice_runs(((0, 3), (10, 14)), 2, 5) == ((2, 3), (10, 12))
    assert slice_runs(((0, 3), (10, 14)), 3, 3) == ()
    assert slice_runs(((0, 3), (10, 14)), 0, 7) == ((0, 3), (10, 14))
