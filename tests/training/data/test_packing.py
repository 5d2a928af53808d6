"""Packed rows: every token once, in order, with the targets and positions of its document alone."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from parallelize.base.errors import CheckpointError, DataError
from parallelize.training.data.packing import FittedRows, PackedDocuments, PackedRows, best_fit
from tests.support.models import tiny_model
from tests.training.data.test_global_batches import flat

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=30)


def documents_of(lengths):
    """Ids from 1 on, each one once."""
    ids = iter(range(1, 1 + sum(lengths)))
    return [[next(ids) for _ in range(length)] for length in lengths]


def starts_of(documents):
    return [0, *torch.tensor([len(document) for document in documents]).cumsum(0).tolist()][:-1]


def check_rows(rows, documents, length, dropped):
    """Each id once; each target the next id of the document, or -100; positions that restart with documents and
    rows."""
    ids = torch.cat([row["input_ids"] for row in rows]).tolist() if rows else []
    all_ids = flat(documents)
    assert ids == all_ids[: len(ids)] and len(all_ids) - len(ids) <= dropped
    following = {
        token: document[i + 1] if i + 1 < len(document) else -100
        for document in documents
        for i, token in enumerate(document)
    }
    firsts = {document[0] for document in documents}
    for row in rows:
        assert {len(value) for value in row.values()} == {length}
        assert row["targets"].tolist() == [following[token] for token in row["input_ids"].tolist()]
        position = -1
        for i, (token, actual) in enumerate(zip(row["input_ids"].tolist(), row["position_ids"].tolist(), strict=True)):
            position = 0 if i == 0 or token in firsts else position + 1
            assert actual == position


@given(LENGTHS, st.integers(1, 9))
def test_rows_of_a_sequence_of_tokens(lengths, length):
    documents = documents_of(lengths)
    tokens = flat(documents)
    if len(tokens) < length:
        return
    for kind in (torch.tensor, numpy.array):
        rows = PackedRows(kind(tokens), length, starts=starts_of(documents))
        check_rows([rows[i] for i in range(len(rows))], documents, length, length - 1)
    with pytest.raises(IndexError):
        rows[len(rows)]


@given(LENGTHS, st.integers(1, 9), st.data())
def test_rows_of_documents_and_their_state(lengths, length, data):
    documents = documents_of(lengths)
    packed = PackedDocuments(documents, length)
    rows, states = [], [packed.state_dict()]
    for row in packed:
        rows.append(row)
        states.append(packed.state_dict())
    check_rows(rows, documents, length, length)
    taken = data.draw(st.integers(0, len(rows)))
    resumed = PackedDocuments(documents, length)
    resumed.load_state_dict(states[taken])
    assert [row["input_ids"].tolist() for row in resumed] == [row["input_ids"].tolist() for row in rows[taken:]]
    assert [row["targets"].tolist() for row in resumed] == [row["targets"].tolist() for row in rows[taken:]]


def test_labels_for_losses_that_shift():
    rows = PackedRows(torch.arange(1, 9), 8, starts=[0, 3, 4], unshifted=True)
    assert rows[0]["labels"].tolist() == [-100, 2, 3, -100, -100, 6, 7, 8] and "targets" not in rows[0]


@given(st.lists(st.integers(0, 12), max_size=40))
def test_best_fit_puts_each_document_once_and_wastes_little(lengths):
    rows = best_fit(lengths, 12)
    assert sorted(flat(rows)) == [i for i, count in enumerate(lengths) if count]
    used = [sum(lengths[i] for i in row) for row in rows]
    assert all(0 < count <= 12 for count in used)
    assert sum(count <= 6 for count in used) <= 1  # two half-empty rows would have been one


def test_fitted_rows_hold_full_documents():
    documents = documents_of([5, 3, 7, 2])
    rows = FittedRows(documents, 8, pad_id=99)
    assert [row["input_ids"].tolist() for row in (rows[0], rows[1], rows[2])] == [
        [9, 10, 11, 12, 13, 14, 15, 99],
        [1, 2, 3, 4, 5, 6, 7, 8],
        [16, 17, 99, 99, 99, 99, 99, 99],
    ]
    assert rows[1]["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert rows[1]["targets"].tolist() == [2, 3, 4, 5, -100, 7, 8, -100]
    assert rows[2]["position_ids"].tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert rows[2]["targets"].tolist() == [17] + [-100] * 7


def test_labels_of_a_document_say_what_is_learned():
    documents = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}, {"input_ids": torch.tensor([5, 6])}]
    assert FittedRows(documents, 6)[0]["targets"].tolist() == [-100, 3, 4, -100, 6, -100]
    assert FittedRows(documents, 6, unshifted=True)[0]["labels"].tolist() == [-100, -100, 3, 4, -100, 6]


def test_a_packed_row_has_the_loss_of_its_documents():
    """Models that detect packed documents: the sum of losses is that of each document by itself."""
    model = tiny_model("llama", num_hidden_layers=2, seed=1).double()
    documents = [[3, 9, 4, 1], [7, 2], [5, 8, 6, 11, 12]]
    row = FittedRows(documents, 12)[0]
    batch = {name: value[None] for name, value in row.items()}
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    packed = cross_entropy(logits[0], row["targets"], reduction="sum")
    alone = 0.0
    for document in documents:
        ids = torch.tensor([document])
        alone += cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
    assert packed.item() == pytest.approx(alone, rel=1e-10)


def test_what_makes_no_row_is_refused():
    for slug, call in (
        ("bad-row-length", lambda: PackedRows(torch.arange(5), 8)),
        ("bad-row-length", lambda: PackedDocuments([[1]], 0)),
        ("bad-row-length", lambda: FittedRows([[1]], 0)),
        ("bad-starts", lambda: PackedRows(torch.arange(9), 8, starts=[1, 4])),
        ("bad-starts", lambda: PackedRows(torch.arange(9), 8, starts=[0, 4, 4])),
        ("bad-starts", lambda: PackedRows(torch.arange(9), 8, starts=[0, 9])),
        ("bad-starts", lambda: PackedRows(torch.arange(9), 8, starts=[])),
        ("long-documents", lambda: FittedRows([[1] * 9, [1]], 8)),
        ("unequal-labels", lambda: FittedRows([{"input_ids": [1, 2], "labels": [1]}], 8)),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert caught.value.slugs == (slug,), caught.value
    assert len(FittedRows([[1] * 9, [1]], 8, truncate=True)) == 2
    for state in (None, {}, {"used": -1, "documents": {"epoch": 0, "taken": 0}}, {"used": 0, "documents": None}):
        with pytest.raises(CheckpointError) as caught:
            PackedDocuments([[1]], 1).load_state_dict(state)
        assert caught.value.slugs == ("data-position",)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint16", "uint32", "uint64"])
def test_starts_may_have_any_dtype_of_integers(dtype):
    rows = PackedRows(torch.arange(20), 4, starts=numpy.array([0, 3, 9], dtype=dtype))
    assert [rows[i]["position_ids"].tolist() for i in range(3)] == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 1, 2]]
    with pytest.raises(DataError, match="bad-starts"):
        PackedRows(torch.arange(20), 4, starts=numpy.array([0, 9, 3], dtype=dtype))


@pytest.mark.parametrize("kind", [torch.tensor, numpy.array])
def test_a_row_that_is_changed_leaves_the_data_as_it_is(kind):
    tokens = kind(list(range(20)))
    rows = PackedRows(tokens, 4)
    rows[1]["input_ids"].fill_(-7)
    assert rows[1]["input_ids"].tolist() == [4, 5, 6, 7] and int(tokens[4]) == 4


def test_lengths_that_are_not_those_of_the_documents_are_refused():
    documents = documents_of([6, 4, 2])
    for lengths in ([6, 4], [6, 4, 2, 1]):
        with pytest.raises(DataError, match=f"{len(lengths)} lengths of 3 documents") as caught:
            FittedRows(documents, 8, lengths=lengths)
        assert caught.value.slugs == ("unequal-lengths",)
    rows = FittedRows(documents, 8, lengths=torch.tensor([4, 4, 2]))
    with pytest.raises(DataError, match="document 0 has 6 tokens, and a row was made for 4") as caught:
        rows[0]
    assert caught.value.slugs == ("unequal-lengths",)
    assert rows[1]["input_ids"].tolist() == [11, 12, 0, 0, 0, 0, 0, 0]
    shorter = FittedRows(documents, 8, lengths=[8, 4, 4])
    assert shorter[0]["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    truncated = FittedRows(documents, 4, lengths=[6, 4, 2], truncate=True)
    assert truncated[0]["input_ids"].tolist() == [1, 2, 3, 4]


def test_starts_of_any_integers():
    tokens = numpy.arange(32)
    for dtype in (numpy.uint16, numpy.uint32, numpy.uint64):
        assert len(PackedRows(tokens, 8, starts=numpy.array([0, 9, 13], dtype=dtype))) == 4
    with pytest.raises(DataError, match="bad-starts"):
        PackedRows(tokens, 8, starts=numpy.array([0, 9, 3], dtype=numpy.uint8))


def test_rows_are_copies():
    tokens = torch.arange(32)
    PackedRows(tokens, 8)[0]["input_ids"][0] = -7
    assert tokens[0] == 0


def test_lengths_that_documents_do_not_have_are_refused():
    documents = [[1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DataError, match="unequal-lengths: there are 1 lengths of 2 documents"):
        FittedRows(documents, 8, lengths=[3])
    with pytest.raises(DataError, match="unequal-lengths: document 1 has 4 tokens"):
        FittedRows(documents, 4, lengths=[3, 2])[1]


def test_a_copy_of_packed_documents_has_a_position_of_its_own():
    documents = PackedDocuments([[1, 2, 3], [4, 5, 6, 7, 8]], 3)
    rows = iter(copy.deepcopy(documents))
    next(rows)
    assert documents.state_dict()["used"] == 0
