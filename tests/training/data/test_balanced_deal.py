"""Samples that are dealt by what they cost: the same global batches, resumed on any mesh, and even ranks."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from parallelize.base.errors import DataError, ShapeError
from parallelize.base.partition import balance_of, best_balance
from parallelize.training.data.balanced_deal import RowCosts, balanced_deal, consecutive_deal
from parallelize.training.data.collate import collate_rows
from parallelize.training.data.global_batches import GlobalBatches
from parallelize.training.data.packing import FittedRows, JoinedRows
from tests.training.data.test_global_batches import data_mesh

COSTS = RowCosts(token=1.0, pair=1e-4)
WAYS = [{}, {"joined": True}, {"lockstep": True}, {"joined": True, "lockstep": True}]


def drawn_lengths(count: int, seed: int = 0, most: int = 8192) -> list[int]:
    """Log-normal, as those of public sets for fine-tuning."""
    draw = random.Random(seed)
    return [min(most, max(8, int(math.exp(draw.gauss(6.2, 1.0))))) for _ in range(count)]


def sums(deal, costs):
    return [[sum(costs[n] for n in part) for part in rank] for rank in deal]


def lockstep(parts):
    """The balance where ranks wait for each other in every microbatch."""
    return sum(map(sum, parts)) / len(parts) / sum(max(of) for of in zip(*parts, strict=True))


@pytest.mark.parametrize("ways", WAYS, ids=str)
@given(
    st.lists(st.integers(1, 10**4), min_size=8, max_size=8), st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (8, 1)])
)
def test_every_sample_once(ways, lengths, sizes):
    ranks, microbatches = sizes
    deal = balanced_deal(COSTS.of(lengths), ranks, microbatches, **ways)
    assert sorted(n for rank in deal for part in rank for n in part) == list(range(8))
    assert len(deal) == ranks and all(len(rank) == microbatches and all(rank) for rank in deal)
    if not ways.get("joined"):
        assert {len(part) for rank in deal for part in rank} == {8 // ranks // microbatches}
    assert deal == balanced_deal(COSTS.of(list(lengths)), ranks, microbatches, **ways)


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 1), (8, 4), (16, 4)])
def test_ranks_are_even(ranks, microbatches):
    lengths = drawn_lengths(32 * ranks)
    costs = COSTS.of(lengths)
    before = sums(consecutive_deal(len(lengths), ranks, microbatches), costs)
    assert best_balance(costs, ranks) == 1 and balance_of([sum(rank) for rank in before]) < 0.9
    for ways in WAYS[:2]:
        assert balance_of([sum(rank) for rank in sums(balanced_deal(costs, ranks, microbatches, **ways), costs)]) > 0.99
    parts = sums(balanced_deal(costs, ranks, microbatches, joined=True, lockstep=True), costs)
    assert lockstep(parts) > 0.99 and balance_of([sum(rank) for rank in parts]) > 0.99
    assert lockstep(before) < 0.9


def test_few_long_samples_leave_a_sample_for_each_microbatch():
    deal = balanced_deal([100.0, 100.0, 1.0, 1.0, 1.0, 1.0], 2, 3, joined=True)
    assert all(len(part) == 1 for rank in deal for part in rank)
    assert sums(deal, [100.0, 100.0, 1.0, 1.0, 1.0, 1.0]) == [[100, 1, 1]] * 2


def test_a_long_sample_takes_small_ones_beside_it():
    """Rather than that every microbatch costs as much as it."""
    costs = [30.0, *[9.0] * 6, *[1.0] * 6]
    deal = balanced_deal(costs, 3, 3, joined=True)
    assert max(sum(rank) for rank in sums(deal, costs)) == 32


# -- global batches ----------------------------------------------------------------------------------------------------


def batches_of(lengths, mesh, **options):
    options = {"costs": COSTS.of(lengths), "joined": True, "seed": 3, **options}
    return GlobalBatches(len(lengths), 24, mesh=mesh, **options)


def flat(step):
    return [n for part in step for n in (part if isinstance(part, tuple) else (part,))]


@pytest.mark.parametrize("ways", WAYS, ids=str)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 3), (4, 2)])
def test_global_batches_are_those_without_costs(ranks, microbatches, ways):
    lengths = drawn_lengths(100)
    plain = [set(step) for step in GlobalBatches(100, 24, seed=3)]
    options = {**ways, "joined": ways.get("joined", False), "num_microbatches": microbatches}
    dealt = [list(batches_of(lengths, data_mesh(rank, ranks), **options)) for rank in range(ranks)]
    for step, expected in enumerate(plain):
        samples = [n for rank in dealt for n in flat(rank[step])]
        assert set(samples) == expected and len(samples) == 24


def test_a_run_goes_on_on_other_ranks():
    lengths = drawn_lengths(100)
    batches = batches_of(lengths, data_mesh(0, 2), num_microbatches=2)
    assert len(list(itertools.islice(batches, 2))) == 2
    state = batches.state_dict()
    remaining = [set(step) for step in itertools.islice(GlobalBatches(100, 24, seed=3), 2, None)]
    resumed = [batches_of(lengths, data_mesh(rank, 3), num_microbatches=4) for rank in range(3)]
    for each in resumed:
        each.load_state_dict(state)
    steps = zip(*(list(each) for each in resumed), strict=True)
    assert [{n for rank in step for n in flat(rank)} for step in steps] == remaining
    again = batches_of(lengths, data_mesh(1, 2), num_microbatches=2)
    other = batches_of(lengths, data_mesh(1, 2), num_microbatches=2)
    again.load_state_dict(state)
    assert list(again) == list(other)[2:], "a rank of the same mesh gets the same samples"


def test_ranks_of_a_data_rank_get_the_same():
    """Those of `tp`: the deal depends on the data rank alone."""
    lengths = drawn_lengths(48)
    first, second = (data_mesh(1, 2) for _ in range(2))
    first.coordinates[1], second.coordinates[1] = 0, 1
    assert list(batches_of(lengths, first)) == list(batches_of(lengths, second))


@pytest.mark.parametrize(
    ("options", "error", "slug"),
    [
        ({"costs": [1.0] * 23}, DataError, "bad-costs"),
        ({"costs": [1.0] * 23 + [0.0]}, DataError, "bad-costs"),
        ({"costs": [1.0] * 23 + [float("nan")]}, DataError, "bad-costs"),
        ({"costs": None, "joined": True}, DataError, "bad-costs"),
        ({"joined": False, "num_microbatches": 5}, ShapeError, "indivisible-batch"),
        ({"joined": True, "num_microbatches": 13}, ShapeError, "indivisible-batch"),
    ],
)
def test_what_cannot_be_dealt(options, error, slug):
    with pytest.raises(error) as caught:
        batches_of([5] * 24, data_mesh(0, 2), **options)
    assert caught.value.slugs == (slug,)


# -- joined rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unshifted", [False, True])
def test_joined_rows_are_fitted_rows_without_padding(unshifted):
    documents = [torch.arange(10 * n, 10 * n + length) for n, length in enumerate((3, 5, 2))]
    row = JoinedRows(documents, unshifted=unshifted)[(1, 0, 2)]
    assert row.pop("row_lengths") == 10
    assert row["input_ids"].tolist() == [10, 11, 12, 13, 14, 0, 1, 2, 20, 21]
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    fitted = FittedRows([documents[n] for n in (1, 0, 2)], 10, unshifted=unshifted)
    assert fitted.rows == [[0, 1, 2]] and all(torch.equal(row[name], fitted[0][name]) for name in row)


def test_a_loader_makes_a_row_for_each_microbatch():
    rows = JoinedRows([torch.ones(length, dtype=torch.long) for length in (9, 2, 3, 2, 1, 4)])
    batches = GlobalBatches(6, 6, costs=COSTS.of(rows.lengths), num_microbatches=2, joined=True)
    (batch,) = DataLoader(rows, batch_sampler=batches, collate_fn=collate_rows)
    assert batch["input_ids"].shape[0] == 2 and sorted(batch["row_lengths"].tolist()) == [10, 11]
    assert "attention_mask" not in batch, "which would turn the detection of documents off"


def test_rows_say_the_lengths_of_their_documents():
    rows = FittedRows([[1] * length for length in (7, 2, 4, 3)], 8)
    assert sorted(map(sorted, rows.row_lengths)) == [[1, 3, 4], [1, 7], [2, 6]]
    assert RowCosts(2.0, 1.0).of_rows([[7, 1], [3]]) == [2 * 8 + 49 + 1, 6 + 9]
