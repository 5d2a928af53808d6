"""Loaders that divide over the world are refused; those that divide over the data ranks are not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from parallelize.base.errors import DataError
from parallelize.training.data.global_batches import GlobalBatches
from parallelize.training.data.iterable_batches import IterableBatches
from parallelize.training.data.loader_check import check_loader
from tests.training.data.test_global_batches import data_mesh

DATA = list(range(16))


def distributed(count, index):
    return DataLoader(DATA, sampler=DistributedSampler(DATA, num_replicas=count, rank=index))


class BatchSamplerShard(BatchSampler):
    """As accelerate names what it keeps."""

    def __init__(self, count, index):
        super().__init__(SequentialSampler(DATA), 2, False)
        self.batch_sampler, self.num_processes, self.process_index = (
            BatchSampler(SequentialSampler(DATA), 2, False),
            count,
            index,
        )


class SplitByNode(list):
    """As `datasets.split_dataset_by_node` leaves its configuration."""

    def __init__(self, count, index):
        super().__init__(DATA)
        self._distributed = SimpleNamespace(world_size=count, rank=index)


KINDS = {
    "DistributedSampler": distributed,
    "BatchSamplerShard": lambda count, index: DataLoader(DATA, batch_sampler=BatchSamplerShard(count, index)),
    "SimpleNamespace": lambda count, index: DataLoader(SplitByNode(count, index)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_over_the_world_is_refused(kind):
    mesh = data_mesh(1, 2)  # dp=2, tp=2: this is rank 3 of 4, and data rank 1 of 2
    check_loader(KINDS[kind](2, 1), mesh)
    for count, index in ((4, 3), (2, 0)):
        with pytest.raises(DataError) as caught:
            check_loader(KINDS[kind](count, index), mesh)
        assert caught.value.slugs == ("loader-over-world",)
        for words in (kind, f"part {index} of {count}", "data rank 1 of 2"):
            assert words in str(caught.value)


def test_loaders_without_shards_pass():
    check_loader(DataLoader(DATA, batch_sampler=GlobalBatches(16, 4, mesh=data_mesh(1, 2))), data_mesh(1, 2))
    check_loader(iter(DATA), data_mesh(1, 2))


def test_tracking_a_loader_of_another_sampler_is_refused():
    batches = GlobalBatches(16, 4)
    for loader in (distributed(2, 0), DataLoader(DATA, batch_size=4)):
        with pytest.raises(DataError) as caught:
            batches.track(loader)
        assert caught.value.slugs == ("other-sampler",)
    assert [batch.tolist() for batch in batches.track(DataLoader(DATA, batch_sampler=batches))] == list(
        GlobalBatches(16, 4)
    )
    # which indexes with each list
    by_lists = DataLoader(torch.arange(16), sampler=GlobalBatches(16, 4), batch_size=None)
    assert len(list(by_lists.sampler.track(by_lists))) == 4


def test_tracking_a_loader_that_joins_batches_is_refused():
    batches = GlobalBatches(16, 4)
    with pytest.raises(DataError) as caught:
        batches.track(DataLoader(DATA, sampler=batches, batch_size=2))
    assert caught.value.slugs == ("other-sampler",) and "joins 2 of these batches" in str(caught.value)
    ListsOfRows = type("ListsOfRows", (list,), {"__getitem__": lambda self, rows: torch.tensor(rows)})
    one_by_one = batches.track(DataLoader(ListsOfRows(DATA), sampler=batches, batch_size=1))
    assert len(list(one_by_one)) == 4 and (batches.epoch, batches.batches_done) == (1, 0)


class DataLoaderDispatcher(DataLoader):
    """As accelerate's: its first process reads, and each of all processes gets a slice."""

    submesh_tp = None

    def __init__(self, count, index):
        super().__init__(DATA)
        self.state, self.slice_fn = SimpleNamespace(num_processes=count, process_index=index), list


def test_a_dispatcher_over_the_world_is_refused():
    mesh = data_mesh(1, 2)
    check_loader(DataLoaderDispatcher(2, 1), mesh)
    loader = DataLoaderDispatcher(4, 3)
    with pytest.raises(
        DataError, match="DataLoaderDispatcher takes part 3 of 4; this rank is data rank 1 of 2"
    ) as caught:
        check_loader(loader, mesh)
    assert caught.value.slugs == ("loader-over-world",) and "num_processes=" not in str(caught.value)
    loader.submesh_tp = mesh  # then it sends all processes the same
    check_loader(loader, data_mesh(0, 1))
    with pytest.raises(DataError, match="takes part 0 of 1; this rank is data rank 1 of 2"):
        check_loader(loader, mesh)


class Prepared(BatchSampler):
    """As accelerate's `prepare` leaves a batch sampler."""

    def __init__(self, batches, count, index):
        self.batch_sampler, self.num_processes, self.process_index = batches, count, index


@pytest.mark.parametrize("kind", ["GlobalBatches", "DistributedSampler"])
def test_a_loader_that_is_divided_twice_is_refused(kind):
    mesh = data_mesh(1, 2)
    divided = GlobalBatches(16, 4, mesh=mesh) if kind == "GlobalBatches" else distributed(2, 1).batch_sampler
    with pytest.raises(DataError, match=rf"Prepared and {kind} takes one of 2 parts") as caught:
        check_loader(DataLoader(DATA, batch_sampler=Prepared(divided, 2, 1)), mesh)
    assert caught.value.slugs == ("divided-twice",)
    check_loader(DataLoader(DATA, batch_sampler=Prepared(GlobalBatches(16, 4), 1, 0)), data_mesh(0, 1))


def test_our_batches_of_another_mesh_are_refused():
    mesh = data_mesh(1, 2)
    batches = GlobalBatches(16, 4)
    loaders = [DataLoader(DATA, batch_sampler=batches), IterableBatches([DATA], 4).loader()]
    for loader in [*loaders, batches.track(loaders[0])]:
        with pytest.raises(DataError, match="takes part 0 of 1; this rank is data rank 1 of 2") as caught:
            check_loader(loader, mesh)
        assert caught.value.slugs == ("loader-over-world",) and "mesh=mesh" in str(caught.value)
    check_loader(IterableBatches([DATA], 4, mesh=mesh).loader(), mesh)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_that_nothing_divides_is_warned_of(shuffle, caplog):
    loader = DataLoader(DATA, batch_size=4, shuffle=shuffle)
    check_loader(loader, data_mesh(0, 1))
    assert not caplog.records
    check_loader(loader, data_mesh(1, 2))
    assert "nothing in the loader divides its samples over the 2 data ranks" in caplog.text
