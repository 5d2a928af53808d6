"""Layouts: which rank stores which slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallelize import Layout, ShapeError, ShardInfo
from parallelize.base.layout import Chunk, SlicePair, chunked, packed, replicated, tiled
from parallelize.state.layout_tensor.layout_shard import store


def test_a_tensor_over_ranks_0_and_3():
    info = ShardInfo("w", (0, 3), chunked((8, 64), 1, 2))
    assert info.full_shape == (8, 64)
    (first,), (second,) = info.slices(0), info.slices(3)
    assert first.local == (slice(0, 8), slice(0, 32)) and first.full == (slice(0, 8), slice(0, 32))
    assert second.local == (slice(0, 8), slice(0, 32)) and second.full == (slice(0, 8), slice(32, 64))
    assert info.multiplicity(first) == 1


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunked_is_torch_chunk(size, ranks):
    layout = chunked((size, 3), 0, ranks)
    full = torch.arange(size * 3).view(size, 3)
    shards = torch.chunk(full, ranks) if size else ()
    for rank in range(ranks):
        expected = shards[rank] if rank < len(shards) else full[:0]
        assert torch.equal(store(full, layout, rank), expected)
    assert layout.is_canonical


chunks = st.lists(
    st.one_of(
        st.integers(0, 12).map(Chunk),
        st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4, 8])).map(lambda t: Chunk(t[0] * t[1], t[1], True)),
    ),
    min_size=1,
    max_size=4,
)


@given(chunks, st.sampled_from([1, 2, 4]))
def test_every_element_is_stored_and_round_trips(chunks, ranks):
    size = sum(chunk.size for chunk in chunks)
    layout = packed((2, size), 1, ranks, chunks)
    full = torch.arange(2 * size).view(2, size)
    restored, copies = torch.full_like(full, -1), torch.zeros(size, dtype=torch.long)
    for rank in range(ranks):
        local = store(full, layout, rank)
        if not layout.is_canonical:
            assert local.shape[1] == layout.stored_local_size
        for pair in layout.slices(rank):
            assert torch.equal(local[pair.local], full[pair.full])
            restored[pair.full] = local[pair.local]
            copies[pair.full[1]] += 1
    assert torch.equal(restored, full) and (copies > 0).all()
    shared = {
        index
        for r in range(ranks)
        for start, stop in layout.owned[r]
        if len(layout.holders(r, (start, stop))) > 1
        for index in range(start, stop)
    }
    assert shared == {index for index in range(size) if copies[index] > 1}


def test_tiles_of_two_dims_round_trip():
    """Two intervals of rows, which change fastest, of a packed dim over three ranks; each tile on two of twelve
    ranks."""
    layout = tiled(packed((4, 12, 5), 1, 3, [Chunk(6), Chunk(6)]), 12, 2)
    full = torch.arange(4 * 12 * 5).view(4, 12, 5)
    restored = torch.full_like(full, -1)
    for rank in range(12):
        local = store(full, layout, rank)
        assert local.shape == layout.local_shape(rank) == layout.stored_local_shape(rank) == (2, 4, 5)
        for pair in layout.slices(rank):
            assert torch.equal(local[pair.local], full[pair.full])
            restored[pair.full] = local[pair.local]
        assert layout.shared(rank) == ((0, 2, (rank % 6, rank % 6 + 6)), (2, 4, (rank % 6, rank % 6 + 6)))
    assert torch.equal(restored, full) and not layout.is_canonical and layout.sharded_dims == (0, 1)
    assert layout.rows[1] == (2, 4) and layout.owned[2] == ((2, 4), (8, 10))


def test_replicated_heads_list_the_ranks_that_store_them():
    layout = packed((8, 5), 0, 4, [Chunk(8, 2, True)])
    assert layout.owned == (((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),))
    assert layout.shared(0) == ((0, 4, (0, 1)),) and layout.shared(3) == ((0, 4, (2, 3)),)
    assert layout.stored_shape == (16, 5) and not layout.is_canonical


def test_units_that_neither_divide_nor_replicate_are_refused():
    with pytest.raises(ShapeError) as error:
        packed((9, 5), 0, 2, [Chunk(9, 3, True)])
    assert error.value.slugs == ("uneven-units",)


def test_replicated():
    layout = replicated((3, 4), 2)
    assert isinstance(layout, Layout) and layout.local_shape(1) == (3, 4) and layout.shared(0) == ()


intervals = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted).map(tuple)


@given(intervals, st.integers(0, 6), st.integers(0, 4))
def test_the_part_of_a_pair_in_a_box_has_the_same_elements_on_both_sides(box, first, size):
    """By what the slices take from a full tensor, and from a local one that stores some of its rows after others."""
    full = torch.arange(12 * 3).view(12, 3)
    pair = SlicePair((slice(2, 2 + size), slice(0, 3)), (slice(first, first + size), slice(0, 3)))
    local = torch.full((8, 3), -1)
    local[pair.local] = full[pair.full]
    rows = set(range(*box)) & set(range(first, first + size))
    part = pair.within((box, (0, 2)))
    assert (part is None) == (not rows)
    if part is not None:
        assert torch.equal(local[part.local], full[part.full])
        assert {int(value) // 3 for value in full[part.full].flatten()} == rows
        assert part.box == ((min(rows), max(rows) + 1), (0, 2))


@given(intervals, st.integers(0, 6), st.integers(0, 4))
def test_the_part_of_a_pair_in_a_window_counts_from_the_window(window, first, size):
    full = torch.arange(12)
    pair = SlicePair((slice(2, 2 + size),), (slice(first, first + size),))
    local = torch.full((8,), -1)
    local[pair.local] = full[pair.full]
    part = pair.in_window([window])
    stored = local[slice(*window)]
    assert (part is None) == bool((stored < 0).all())
    if part is not None:
        assert torch.equal(stored[part.local], full[part.full]) and len(full[part.full]) == int((stored >= 0).sum())


def test_a_scalar_is_in_every_box():
    pair = SlicePair((), ())
    assert pair.within(()) == pair and pair.in_window([]) == pair and pair.box == ()
