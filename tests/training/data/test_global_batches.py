"""Which samples a rank gets: the same global batches on any mesh, and exactly the remaining ones after resuming."""

from __future__ import annotations

import collections
import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from parallelize.base.errors import CheckpointError, DataError, ShapeError
from parallelize.checkpoint.format.json_codec import decode, encode
from parallelize.training.data.global_batches import GlobalBatches, SampleOrder

PARALLEL = pytest.mark.parametrize("workers", [0, 2])


class Mesh:
    """The part of a DeviceMesh that GlobalBatches uses."""

    def __init__(self, sizes: dict[str, int], **coordinates: int):
        self.mesh_dim_names, self.shape = tuple(sizes), tuple(sizes.values())
        self.coordinates = [coordinates.get(name, 0) for name in sizes]

    def get_local_rank(self, dim: int) -> int:
        return self.coordinates[dim]


def data_mesh(rank: int, ranks: int) -> Mesh:
    return Mesh({"dp": ranks, "tp": 2}, dp=rank, tp=rank % 2)


def loader_of(batches: GlobalBatches, workers: int) -> DataLoader:
    prefetch = {"prefetch_factor": 3} if workers else {}
    return DataLoader(range(batches.num_samples), batch_sampler=batches, num_workers=workers, **prefetch)


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


def through_json(state):
    return decode(json.loads(json.dumps(encode(state), allow_nan=False)))


def refused(slug, call, *words):
    with pytest.raises((CheckpointError, ShapeError)) as caught:
        call()
    assert caught.value.slugs == (slug,), caught.value
    for word in words:
        assert word in str(caught.value), caught.value


# -- the order ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 5))
def test_an_order_is_a_permutation(count, seed, epoch):
    assert sorted(SampleOrder(count, seed, epoch).samples(range(count))) == list(range(count))


def test_a_part_of_an_order_equals_that_part_of_the_full_order():
    order = SampleOrder(1000, 3, 1)
    full = order.samples(range(1000))
    assert [order.samples(range(start, start + 7)) for start in (0, 500, 993)] == [
        full[start : start + 7] for start in (0, 500, 993)
    ]
    huge = SampleOrder(10**12, 3, 1).samples(range(10**12 - 512, 10**12))
    assert len(set(huge)) == 512 and max(huge) < 10**12 and max(huge) > 9 * 10**11


@pytest.mark.variants(every=5)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 7])
def test_small_orders_are_about_equally_likely(count):
    """Each permutation of up to 4 samples; beyond, each pair of first samples. Chi-square, mean + 5 deviations."""
    length = count if count <= 4 else 2
    counts = collections.Counter(tuple(SampleOrder(count, 0, epoch).samples(range(length))) for epoch in range(1500))
    permutations = list(itertools.permutations(range(count), length))
    expected = 1500 / len(permutations)
    squares = sum((counts[order] - expected) ** 2 / expected for order in permutations)
    freedom = len(permutations) - 1
    assert squares < freedom + 5 * (2 * freedom) ** 0.5, squares


def test_a_long_order_has_no_trend():
    """Neighbors in the order are unrelated, and so are position and sample."""
    order = torch.tensor(SampleOrder(20000, 1, 0).samples(range(20000)), dtype=torch.float64)
    for other in (torch.arange(20000, dtype=torch.float64), order.roll(1), order.roll(142)):
        assert abs(torch.corrcoef(torch.stack([order, other]))[0, 1]) < 0.035  # 5 / sqrt(20000)


def test_the_order_is_the_same_on_every_machine():
    """Fixed numbers: a saved position is meaningless if they change."""
    assert SampleOrder(1000, 7, 2).samples(range(6)) == [639, 212, 578, 933, 937, 817]


# -- epochs ------------------------------------------------------------------------------------------------------------


def test_epochs_follow_each_other_in_other_orders():
    batches = GlobalBatches(10, 3, seed=1)
    epochs = [list(batches) for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [3, 3, 3] and batches.epoch == 3
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch in epochs:
        assert len(set(flat(epoch))) == 9
    assert list(GlobalBatches(10, 3, seed=1)) == epochs[0] != list(GlobalBatches(10, 3, seed=2))


def test_without_shuffling_the_order_is_the_data_sets():
    batches = GlobalBatches(7, 3, shuffle=False, drop_last=False)
    assert list(batches) == [[0, 1, 2], [3, 4, 5], [6]] == list(batches)
    assert list(GlobalBatches(7, 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5]]


def test_length_is_what_is_left():
    batches = GlobalBatches(20, 4)
    assert len(batches) == batches.steps_per_epoch == 5
    for _ in zip(range(2), batches, strict=False):
        pass
    assert len(batches) == 3 == len(list(batches)) and len(batches) == 5


# -- data ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("drop_last", [True, False])
def test_all_ranks_together_get_the_global_batch_in_order(ranks, drop_last):
    unsharded = GlobalBatches(44, 8, seed=3, drop_last=drop_last)
    parts = [GlobalBatches(44, 8, seed=3, drop_last=drop_last, mesh=data_mesh(n, ranks)) for n in range(ranks)]
    for _ in range(2):
        expected, by_rank = list(unsharded), [list(part) for part in parts]
        assert len(expected) == 5 + (not drop_last)
        assert [flat(samples) for samples in zip(*by_rank, strict=True)] == expected
        assert all(len(part[step]) == len(batch) // ranks for part in by_rank for step, batch in enumerate(expected))


def test_only_data_axes_split_the_batch():
    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}
    expected = next(iter(GlobalBatches(120, 12)))
    for replica, shard in itertools.product(range(2), range(3)):
        for others in ({}, {"pp": 1, "cp": 1, "tp": 1}):
            mesh = Mesh(sizes, dp_replicate=replica, dp_shard=shard, **others)
            rank = replica * 3 + shard
            assert next(iter(GlobalBatches(120, 12, mesh=mesh))) == expected[rank * 2 : rank * 2 + 2]
    assert next(iter(GlobalBatches(120, 12, mesh=Mesh({"tp": 2}, tp=1)))) == expected


def test_sizes_that_do_not_divide_are_refused():
    mesh = data_mesh(0, 4)
    refused("indivisible-batch", lambda: GlobalBatches(100, 6, mesh=mesh), "6", "4 data ranks")
    refused("indivisible-batch", lambda: GlobalBatches(102, 8, drop_last=False, mesh=mesh), "6", "drop_last=True")
    GlobalBatches(102, 8, mesh=mesh), GlobalBatches(100, 8, drop_last=False, mesh=mesh)
    for count, size in ((5, 8), (0, 8), (8, 0), (-8, 4), (8, -4)):
        refused("no-batches", lambda count=count, size=size: GlobalBatches(count, size))


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.variants(every=2)
@PARALLEL
@pytest.mark.parametrize("taken", [0, 3, 5, 7])
def test_resumed_gets_exactly_the_remaining_batches(workers, taken):
    """Over three epochs of five batches, although workers are up to six batches ahead."""
    first = GlobalBatches(22, 4, seed=5)
    expected = flat(list(first) for _ in range(3))
    before = GlobalBatches(22, 4, seed=5)
    assert collect(before, workers, taken) == expected[:taken]
    state = through_json(before.state_dict())
    assert (state["epoch"], state["batches_done"]) == divmod(taken, 5)
    after = GlobalBatches(22, 4, seed=99)
    after.load_state_dict(state)
    assert collect(after, workers, 15 - taken) == expected[taken:]


def collect(batches, workers, count):
    """Take `count` batches, and leave the last iteration unfinished."""
    tracked, taken = batches.track(loader_of(batches, workers)), []
    while len(taken) < count:
        for batch in tracked:
            taken.append(batch.tolist())
            if len(taken) == count:
                break
    return taken


@PARALLEL
def test_an_iteration_left_early_loses_nothing(workers):
    batches = GlobalBatches(20, 4)
    expected = list(GlobalBatches(20, 4))
    tracked = batches.track(loader_of(batches, workers))
    assert next(iter(tracked)).tolist() == expected[0]
    assert len(tracked) == 4
    assert [batch.tolist() for batch in tracked] == expected[1:]


def test_persistent_workers_and_an_endless_loader():
    batches = GlobalBatches(12, 4)
    expected = [list(epoch) for epoch in itertools.repeat(GlobalBatches(12, 4), 3)]
    loader = DataLoader(range(12), batch_sampler=batches, num_workers=1, persistent_workers=True)
    endless = batches.track(batch for _ in itertools.count() for batch in loader)
    taken = [batch.tolist() for batch in itertools.islice(endless, 9)]
    assert taken == flat(expected) and (batches.epoch, batches.batches_done) == (3, 0)


def test_untracked_counts_what_was_handed_out():
    batches = GlobalBatches(20, 4)
    iteration = iter(batches)
    next(iteration), next(iteration)
    assert batches.state_dict()["batches_done"] == 2
    assert list(iteration) + [next(iter(batches))] == list(GlobalBatches(20, 4))[2:] + [list_of(20, 4, epoch=1)[0]]


def list_of(count, size, epoch):
    batches = GlobalBatches(count, size)
    batches.load_state_dict({**batches.state_dict(), "epoch": epoch})
    return list(batches)


def test_resumed_on_another_mesh():
    before = GlobalBatches(48, 8, mesh=data_mesh(1, 2))
    collect(before, 0, 2)
    parts = [GlobalBatches(48, 8, mesh=data_mesh(n, 4)) for n in range(4)]
    for part in parts:
        part.load_state_dict(before.state_dict())
    assert [flat(samples) for samples in zip(*parts, strict=True)] == list(GlobalBatches(48, 8))[2:]


def test_another_batch_size_goes_on_at_the_same_sample():
    before = GlobalBatches(50, 4)
    collect(before, 0, 6)
    samples = flat(GlobalBatches(50, 4, drop_last=False))
    for size in (2, 3, 6, 8, 12, 24):
        after = GlobalBatches(50, size)
        after.load_state_dict(before.state_dict())
        assert flat(after) == samples[24 : 50 // size * size]
    after = GlobalBatches(50, 10, mesh=data_mesh(0, 2))
    refused("data-position", lambda: after.load_state_dict(before.state_dict()), "24 samples", "10", "6 or 8 or 12")
    assert after.state_dict() == GlobalBatches(50, 10).state_dict()


def test_a_batch_size_with_no_full_batch_left_begins_the_next_epoch():
    before = GlobalBatches(50, 4)
    collect(before, 0, 12)
    after = GlobalBatches(50, 48)
    after.load_state_dict(before.state_dict())
    assert (after.epoch, after.batches_done) == (1, 0)


def test_other_data_and_damaged_states_are_refused():
    batches = GlobalBatches(50, 4)
    good = batches.state_dict()
    refused("data-position", lambda: GlobalBatches(51, 4).load_state_dict(good), "50", "51")
    refused("data-position", lambda: GlobalBatches(50, 4, shuffle=False).load_state_dict(good), "shuffle=True")
    damaged = [None, {}, {**good, "more": 1}, {**good, "epoch": -1}, {**good, "seed": "a"}, {**good, "epoch": True}]
    damaged += [{**good, "batches_done": 12}, {**good, "global_batch_size": 0}, {**good, "shuffle": 1}]
    for state in damaged:
        refused("data-position", lambda state=state: batches.load_state_dict(state))
    assert batches.state_dict() == good


def test_a_loader_that_joins_batches_is_refused():
    batches = GlobalBatches(24, 4)
    with pytest.raises(DataError, match="other-sampler: the loader joins 2 of these batches"):
        batches.track(DataLoader(range(24), sampler=batches, batch_size=2))
