"""A source is iterated again and again: iterators, single samples and names of files are refused."""

from __future__ import annotations

import io
from typing import Any

import pytest

from parallelize import DataError, IterableBatches, PackedDocuments


class Stateful:
    """An iterator that continues from a state of its own."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Stateful:
        return self

    def __next__(self) -> int:
        self.position += 1
        if self.position > 8:
            raise StopIteration
        return self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def refused(sources: Any, size: int = 4) -> str:
    with pytest.raises(DataError) as error:
        IterableBatches(sources, size)
    assert error.value.slugs == ("bad-source",)
    return str(error.value)


ONCE = [lambda: (i for i in range(8)), lambda: iter([1, 2]), lambda: map(str, [1]), lambda: io.StringIO("a\nb")]


@pytest.mark.parametrize("make", ONCE)
def test_an_iterator_is_refused(make):
    for sources in (make(), [make()], [range(3), make()]):
        text = refused(sources)
        assert "an iterator" in text and "lambda epoch" in text


@pytest.mark.parametrize("sample", ["a.jsonl", b"bytes", bytearray(b"b"), {"ids": [1, 2]}, 7])
def test_a_sample_or_a_name_is_no_source(sample):
    for sources in (sample, [sample] * 4):
        assert "source 0 is a " in refused(sources)
    with pytest.raises(DataError, match="bad-source"):
        PackedDocuments(sample, 2)
    with pytest.raises(DataError, match="what a function of the epoch returns"):
        next(iter(IterableBatches(lambda epoch: sample, 4)))


def test_a_function_returns_a_new_iterator_or_is_refused():
    assert [sum(batch) for batch in IterableBatches(lambda epoch: iter(range(8)), 4)] == [6, 22]
    samples = iter(range(12))
    batches = IterableBatches(lambda epoch: samples, 4)
    assert next(iter(batches)) == [0, 1, 2, 3]
    with pytest.raises(DataError, match="returns again"):
        next(iter(batches))


def test_an_iterator_with_a_state_is_a_source():
    batches = IterableBatches(Stateful(), 4)
    assert next(iter(batches)) == [1, 2, 3, 4] and next(iter(batches)) == [5, 6, 7, 8]


def test_documents_that_can_be_read_once_are_packed_once():
    documents = PackedDocuments(iter([[1, 2, 3], [4, 5, 6, 7]]), 3)
    assert len(list(documents)) == 2
    with pytest.raises(DataError, match="read again"):
        list(documents)
    batches = IterableBatches(lambda epoch: PackedDocuments(iter([[1, 2, 3], [4, 5, 6, 7]]), 3), 1)
    assert [len(list(batches)) for _ in range(2)] == [2, 2]
