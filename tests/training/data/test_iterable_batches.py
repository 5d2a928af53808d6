"""Iterated data: the same global batches on any mesh and with any number of workers, and exactly the remaining ones
later."""

from __future__ import annotations

import itertools
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import get_worker_info

from parallelize.base.errors import CheckpointError, DataError, ShapeError
from parallelize.base.torch_private.torch_tensors import hidden_worker_info, in_data_worker
from parallelize.checkpoint.format.json_codec import decode, encode
from parallelize.checkpoint.run import run_state
from parallelize.comm.mesh_view import MeshView
from parallelize.state.randomness.generators import _uses_cuda
from parallelize.training.data.iterable_batches import IterableBatches, _Samples
from parallelize.training.data.packing import PackedDocuments
from tests.training.data.test_global_batches import data_mesh, flat

WORKERS = pytest.mark.parametrize("workers", [0, 1, 2])


class Shared(list):
    """A list that copies of its owner share."""


class Reads(list):
    """What a source and its copies have read."""

    def __deepcopy__(self, memo):
        return self


class Numbers:
    """Samples that are read from the beginning on."""

    def __init__(self, name: int, count: int):
        self.name, self.count = name, count
        self.reads = Shared()
        self.reads = Reads()  # which copies share

    def __iter__(self):
        for number in range(self.count):
            self.reads.append(number)
            yield self.name * 1000 + number


class Resumable(Numbers):
    """Samples that can be read from a position on."""

    start = 0

    def __iter__(self):
        self.position = self.start
        while self.position < self.count:
            self.reads.append(self.position)
            self.position += 1
            yield self.name * 1000 + self.position - 1

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


def of_epoch(name: int, epoch: int) -> Numbers:
    return Numbers(name * 10 + epoch, 5)


def sources(kind: str):
    """Six sources of different lengths."""
    if kind == "epochs":
        return [partial(of_epoch, name) for name in range(6)]
    return [(Resumable if kind == "resumable" else Numbers)(name, 5 + name) for name in range(6)]


def through_json(state):
    return decode(json.loads(json.dumps(encode(state), allow_nan=False)))


def first(batches, count):
    return list(itertools.islice(batches, count))


KINDS = pytest.mark.parametrize("kind", ["skipped", "resumable", "epochs"])


@KINDS
def test_global_batches_have_the_next_samples_of_each_source(kind):
    batches = first(IterableBatches(sources(kind), 12), 4)
    if kind == "epochs":
        assert batches[2][:4] == [4, 1000, 10004, 11000]
    else:
        assert batches[0] == [0, 1, 1000, 1001, 2000, 2001, 3000, 3001, 4000, 4001, 5000, 5001]
        assert batches[2][:4] == [4, 0, 1004, 1005]


@pytest.mark.variants(every=4)
@KINDS
@WORKERS
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_mesh_and_any_number_of_workers_give_the_same_batches(kind, workers, ranks):
    expected = first(IterableBatches(sources(kind), 12), 5)
    parts = [IterableBatches(sources(kind), 12, mesh=data_mesh(rank, ranks)) for rank in range(ranks)]
    loaders = [first(part.loader(num_workers=workers, collate_fn=list), 5) for part in parts]
    assert [flat(samples) for samples in zip(*loaders, strict=True)] == expected


@pytest.mark.variants(every=3)
@KINDS
@WORKERS
def test_resumed_on_another_mesh_with_other_workers(kind, workers):
    """Three batches on two data ranks, the rest on four, or on one."""
    expected = first(IterableBatches(sources(kind), 12), 7)
    before = [IterableBatches(sources(kind), 12, mesh=data_mesh(rank, 2)) for rank in range(2)]
    for part in before:
        first(part.loader(num_workers=workers), 3)
    states = [through_json(part.state_dict()) for part in before]
    for ranks in (1, 2, 4):
        after = [IterableBatches(sources(kind), 12, mesh=data_mesh(rank, ranks)) for rank in range(ranks)]
        for part in after:
            part.load_state_dict(part.merge_states(states))
        loaders = [first(part.loader(num_workers=2 - workers, collate_fn=list), 4) for part in after]
        assert [flat(samples) for samples in zip(*loaders, strict=True)] == expected[3:]


@pytest.mark.parametrize("kind, count", [("resumable", 2), ("skipped", 4)])
def test_a_resumable_source_reads_only_what_follows(kind, count):
    before = IterableBatches(sources(kind), 12)
    first(before, 1)
    resumed = sources(kind)
    after = IterableBatches(resumed, 12)
    after.load_state_dict(before.state_dict())
    first(after, 1)
    assert [len(source.reads) for source in resumed] == [count] * 6


def test_an_iteration_left_early_loses_nothing():
    batches = IterableBatches(sources("skipped"), 6)
    expected = first(IterableBatches(sources("skipped"), 6), 9)
    loader = batches.loader(num_workers=2, collate_fn=list, prefetch_factor=4)
    assert [first(loader, 4), first(loader, 2), first(batches, 3)] == [expected[:4], expected[4:6], expected[6:]]


class Drawn(Numbers):
    """Samples that are drawn by the worker."""

    def __iter__(self):
        while True:
            yield torch.rand(())


@WORKERS
def test_reading_draws_nothing_from_the_process_and_workers_draw_their_own_numbers(workers):
    drawn = []
    for rank in range(2):
        for _ in range(2):
            batches = IterableBatches([Drawn(n, 0) for n in range(4)], 8, mesh=data_mesh(rank, 2))
            before = torch.get_rng_state()
            drawn.append(torch.cat(first(batches.loader(num_workers=workers), 2)))
            if workers:
                assert torch.equal(torch.get_rng_state(), before)
    if workers:  # in this process they are drawn from its own generator
        assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])
        assert not torch.isin(drawn[0], drawn[2]).any()


@pytest.mark.parametrize("workers", [0, 1])
def test_one_source_is_an_epoch_that_ends_with_its_last_full_batch(workers):
    parts = [IterableBatches(Numbers(0, 11), 4, mesh=data_mesh(rank, 2)) for rank in range(2)]
    loaders = [part.loader(num_workers=workers) for part in parts]
    for epoch in range(2):
        batches = [flat(batch.tolist() for batch in pair) for pair in zip(*loaders, strict=True)]
        assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert parts[0].state_dict()["sources"][0]["epoch"] == epoch + 1
    assert parts[0].state_dict() == parts[1].state_dict()


def test_a_state_after_the_last_batch_of_an_epoch_ends_that_epoch():
    before = IterableBatches(Numbers(0, 8), 4)
    first(before, 2)
    after = IterableBatches(Numbers(0, 8), 4)
    after.load_state_dict(before.state_dict())
    assert [list(after), list(after)] == [[], [[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_a_checkpoint_merges_the_states_of_its_data_ranks():
    """Saved on two data ranks, read by each of three."""
    expected = first(IterableBatches(sources("resumable"), 12), 4)
    saved = {}
    for rank in range(2):
        batches = IterableBatches(sources("resumable"), 12, mesh=data_mesh(rank, 2))
        first(batches, 2)
        on_mesh = SimpleNamespace(place=MeshView(data_mesh(rank, 2)).place, coordinates={"dp": rank, "tp": 0})
        saved |= json.loads(json.dumps(run_state.collect_data(on_mesh, batches, None)))
    assert set(saved) == {"0", "1"}
    parts = [IterableBatches(sources("resumable"), 12, mesh=data_mesh(rank, 3)) for rank in range(3)]
    for rank, part in enumerate(parts):
        on_mesh = SimpleNamespace(place=MeshView(data_mesh(rank, 3)).place, coordinates={"dp": rank, "tp": 0})
        part.load_state_dict(run_state.decoded_data(on_mesh, part, saved, None))
    assert [flat(samples) for samples in zip(*(first(part, 2) for part in parts), strict=True)] == expected[2:]


def test_a_global_batch_of_another_size_goes_on_at_the_same_samples():
    before = IterableBatches(sources("skipped"), 12)
    first(before, 2)
    after = IterableBatches(sources("skipped"), 6)
    after.load_state_dict(before.state_dict())
    assert next(iter(after)) == [4, 1004, 2004, 3004, 4004, 5004]


def test_packed_documents_are_a_source():
    """Documents of 1 to 9 tokens in rows of 8; after loading, the remaining rows, of the remaining documents."""
    documents = [list(range(100 * n, 100 * n + 1 + 5 * n % 9)) for n in range(40)]
    rows = list(PackedDocuments(documents, 8))
    ids = flat(documents)
    assert [row["input_ids"].tolist() for row in rows] == [ids[8 * i : 8 * i + 8] for i in range((len(ids) - 1) // 8)]
    before = IterableBatches(PackedDocuments(documents, 8), 2)
    first(before, 6)
    state = through_json(before.state_dict())
    after = IterableBatches(PackedDocuments(documents, 8), 2)
    after.load_state_dict(state)
    remaining = flat(after)
    assert len(remaining) == len(rows) // 2 * 2 - 12
    assert all(torch.equal(a[name], b[name]) for a, b in zip(remaining, rows[12:], strict=False) for name in a)
    assert state["sources"][0]["source"]["documents"]["taken"] > 10


def test_what_cannot_be_right_is_refused_before_it_runs():
    for slug, error, call in (
        ("indivisible-batch", ShapeError, lambda: IterableBatches(sources("skipped"), 10)),
        ("indivisible-batch", ShapeError, lambda: IterableBatches(Numbers(0, 9), 6, mesh=data_mesh(0, 4))),
        ("indivisible-batch", ShapeError, lambda: IterableBatches([], 6)),
        ("unequal-ends", DataError, lambda: IterableBatches(sources("skipped"), 6, repeat=False)),
        ("too-many-workers", DataError, lambda: IterableBatches(Numbers(0, 9), 3).loader(num_workers=2)),
        ("no-samples", DataError, lambda: next(iter(IterableBatches([Numbers(0, 0), Numbers(1, 3)], 2)))),
    ):
        with pytest.raises(error) as caught:
            call()
        assert caught.value.slugs == (slug,), caught.value
    with pytest.raises(TypeError, match="batch_size"):
        IterableBatches(Numbers(0, 9), 3).loader(batch_size=2)


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    batches = IterableBatches(sources("skipped"), 12, mesh=data_mesh(0, 2))
    first(batches, 1)
    good = batches.state_dict()
    other = IterableBatches(sources("skipped"), 12, mesh=data_mesh(1, 2)).state_dict()
    damaged = [None, {}, {"num_sources": 6}, {**good, "num_sources": 5}, other]
    damaged += [
        {**good, "sources": {**good["sources"], 1: bad}} for bad in (None, {"epoch": 0}, {"epoch": 0, "taken": -1})
    ]
    for state in damaged:
        with pytest.raises(CheckpointError) as caught:
            batches.load_state_dict(state)
        assert caught.value.slugs == ("data-position",)
    assert batches.state_dict() == good


class Delegating:
    """Its state is in a member, which a shallow copy shares."""

    def __init__(self):
        self.inner = Resumable(0, 6)

    def __iter__(self):
        return iter(self.inner)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class Alive(Delegating):
    """Returns the dict that it goes on to change, and shares all of its attributes with shallow copies."""

    def __init__(self):
        self.state = {"position": 0}

    def __copy__(self):
        other = object.__new__(type(self))
        other.__dict__ = self.__dict__
        return other

    def __iter__(self):
        while self.state["position"] < 6:
            self.state["position"] += 1
            yield self.state["position"] - 1

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


@pytest.mark.parametrize("kind", [Delegating, Alive])
def test_later_epochs_begin_at_the_beginning_wherever_a_source_keeps_its_state(kind):
    expected = [[0, 1], [2, 3], [4, 5]] * 3
    before, packed = IterableBatches(kind(), 2, repeat=True), IterableBatches(PackedDocuments([[1, 2]] * 5, 3), 1)
    assert first(before, 2) == expected[:2]
    state = before.state_dict()
    assert first(before, 7) == expected[2:], "the same object, after an iteration that was left early"
    for loader in (lambda batches: batches, lambda batches: batches.loader(num_workers=1, collate_fn=list)):
        after = IterableBatches(kind(), 2, repeat=True)
        after.load_state_dict(state)
        assert first(loader(after), 7) == expected[2:]
    assert len(first(packed, 1)) + len(list(packed)) == len(list(packed)) == 3


def test_a_source_with_a_state_that_cannot_be_copied_is_refused():
    source = Delegating()
    source.file = open(__file__)  # noqa: SIM115
    with source.file, pytest.raises(DataError) as caught:
        first(IterableBatches(source, 2), 1)
    assert caught.value.slugs == ("uncopied-source",) and "Delegating" in str(caught.value)


def test_a_source_without_a_state_cannot_continue_from_one():
    before = IterableBatches(Delegating(), 2, repeat=True)
    first(before, 1)
    plain = IterableBatches(range(6), 2, repeat=True)
    of_epochs = IterableBatches(lambda epoch: range(6), 2, repeat=True)
    of_epochs.load_state_dict(before.state_dict())
    for call in (lambda: plain.load_state_dict(before.state_dict()), lambda: first(of_epochs, 1)):
        with pytest.raises(CheckpointError, match="a range has no load_state_dict") as caught:
            call()
        assert caught.value.slugs == ("data-position",)
    assert first(plain, 1) == [[0, 1]]
    after = IterableBatches(Delegating(), 2, repeat=True)
    after.load_state_dict(plain.state_dict())
    assert first(after, 1) == [[2, 3]], "what was read by count is skipped by count"


class SelfSharding(Numbers):
    """Divides its samples over the workers that it sees, as PyTorch's documents show."""

    def __iter__(self):
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from range(self.name * 1000 + index, self.name * 1000 + self.count, count)


@WORKERS
def test_sources_that_divide_themselves_over_workers_lose_nothing(workers):
    expected = first(IterableBatches([Numbers(0, 7), Numbers(1, 6)], 4), 8)
    loader = IterableBatches([SelfSharding(0, 7), SelfSharding(1, 6)], 4).loader(num_workers=workers, collate_fn=list)
    assert first(loader, 8) == expected


class SeesItsWorker(Numbers):
    """Whether the process is known as a worker's, and whether a source sees no worker."""

    def __iter__(self):
        while True:
            yield (in_data_worker(), get_worker_info() is None)


@pytest.mark.parametrize("workers, expected", [(0, (False, True)), (1, (True, True))])
def test_a_worker_is_known_as_one_although_sources_do_not_see_it(workers, expected):
    loader = IterableBatches(SeesItsWorker(0, 0), 2).loader(num_workers=workers, collate_fn=list)
    assert first(loader, 2) == [[expected] * 2] * 2


def test_the_information_of_a_worker_is_there_again_after_each_step(monkeypatch):
    worker = torch.utils.data._utils.worker
    monkeypatch.setattr(worker, "_worker_info", SimpleNamespace(id=0, num_workers=1))
    steps = iter(_Samples(IterableBatches(SelfSharding(0, 4), 2)._parts))
    for _ in range(2):
        next(steps)
        assert get_worker_info() is not None and in_data_worker()
    with pytest.raises(ZeroDivisionError), hidden_worker_info():
        assert get_worker_info() is None and in_data_worker() and not _uses_cuda()
        raise ZeroDivisionError
    assert get_worker_info().num_workers == 1
    monkeypatch.undo()
    assert not in_data_worker()


def test_the_order_of_what_workers_read_is_kept():
    with pytest.raises(TypeError, match="in_order"):
        IterableBatches(sources("skipped"), 6).loader(num_workers=2, in_order=False)
    loader = IterableBatches(sources("skipped"), 6).loader(num_workers=2, in_order=True, collate_fn=list)
    assert first(loader, 1) == [[0, 1000, 2000, 3000, 4000, 5000]]


class Delegates:
    """Its position is in a member, which a shallow copy shares."""

    def __init__(self, count):
        self.inner = {"at": 0, "count": count}

    def __iter__(self):
        for index in range(self.inner["at"], self.inner["count"]):
            self.inner["at"] = index + 1
            yield index

    def state_dict(self):
        return self.inner

    def load_state_dict(self, state):
        self.inner.update(state)


def test_a_source_whose_state_is_in_a_member_begins_again_in_every_epoch():
    batches = IterableBatches(Delegates(6), 2, repeat=True)
    stream = iter(batches)
    assert [next(stream) for _ in range(2)] == [[0, 1], [2, 3]]
    resumed = IterableBatches(Delegates(6), 2, repeat=True)
    resumed.load_state_dict(batches.state_dict())
    stream = iter(resumed)
    assert [next(stream) for _ in range(5)] == [[4, 5], [0, 1], [2, 3], [4, 5], [0, 1]]


class DividesItself:
    """As data sets do that are made for workers."""

    def __init__(self, first):
        self.first = first

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from range(self.first + index, self.first + 8, count)


def test_a_data_set_that_divides_itself_over_two_workers_is_read_whole():
    sources = [DividesItself(0), DividesItself(1000)]
    expected = [batch for batch, _ in zip(IterableBatches(sources, 4), range(3), strict=False)]
    loader = IterableBatches(sources, 4).loader(num_workers=2, collate_fn=list)
    assert [batch for batch, _ in zip(loader, range(3), strict=False)] == expected


def test_many_samples_in_a_batch_need_no_descriptors_of_their_own():
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[1]), limits[1]))
    try:
        rows = torch.arange(600 * 4).view(600, 4)
        loader = IterableBatches([list(rows)], 300, repeat=False).loader(num_workers=1)
        assert [len(batch) for batch in loader] == [300, 300]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_items_in_another_order_are_refused():
    with pytest.raises(TypeError, match="in_order"):
        IterableBatches(range(2), 1).loader(in_order=False)
