"""Padding of rows to one length."""

from __future__ import annotations

import pytest
import torch

from parallelize.data.collate import collate_rows
from parallelize.errors import DataError
from tests.support.models import tiny_model

SHORT = {"input_ids": [5, 6], "labels": torch.tensor([5, 6]), "position_ids": [0, 1], "id": 7}
LONG = {"input_ids": [1, 2, 3], "labels": torch.tensor([1, 2, 3]), "position_ids": [0, 1, 2], "id": 8}


def without_positions(row):
    return {name: value for name, value in row.items() if name != "position_ids"}


def test_rows_are_padded_to_the_longest_one_and_masked():
    batch = collate_rows([without_positions(SHORT), without_positions(LONG)], pad_id=9, multiple_of=4)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6, 9, 9], [1, 2, 3, 9]],
        "labels": [[5, 6, -100, -100], [1, 2, 3, -100]],
        "id": [7, 8],
        "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 0]],
    }


def test_rows_of_one_length_get_no_mask():
    assert set(collate_rows([LONG, LONG])) == {*LONG}
    row = without_positions(LONG)
    assert collate_rows([row, row], multiple_of=2)["attention_mask"].tolist() == [[1, 1, 1, 0]] * 2


def test_padding_of_rows_with_positions_is_a_document_of_its_own_without_a_mask():
    batch = collate_rows([SHORT, LONG], multiple_of=4)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 0]] and "attention_mask" not in batch
    with_mask = collate_rows([row | {"attention_mask": [1] * len(row["input_ids"])} for row in (SHORT, LONG)])
    assert with_mask["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_padded_rows_of_packed_documents_are_computed_as_the_documents_are():
    model = tiny_model("llama", num_hidden_layers=2, seed=1).double()
    packed = {"input_ids": [3, 9, 4, 7, 2], "position_ids": [0, 1, 2, 0, 1]}
    batch = collate_rows([packed, {"input_ids": [5, 8], "position_ids": [0, 1]}])
    logits = model(**batch, use_cache=False).logits
    for actual, ids in ((logits[0, :3], [3, 9, 4]), (logits[0, 3:], [7, 2]), (logits[1, :2], [5, 8])):
        assert torch.allclose(actual, model(input_ids=torch.tensor([ids])).logits[0], rtol=0, atol=1e-12)


def test_an_empty_row_leaves_the_others_as_they_are():
    large = 2**24 + 1  # which float32 cannot represent
    batch = collate_rows([{"input_ids": [], "labels": torch.tensor([])}, {"input_ids": [large], "labels": [large]}])
    assert batch["input_ids"].tolist() == [[0], [large]] and batch["labels"].tolist() == [[-100], [large]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    weights = [{"weights": []}, {"weights": [0.5]}]
    assert collate_rows(weights, padded_with={"weights": 0})["weights"].tolist() == [[0.0], [0.5]]
    assert collate_rows([{"input_ids": []}] * 2)["input_ids"].dtype == torch.int64


def test_a_mask_of_the_rows_is_padded():
    rows = [{"input_ids": [1], "attention_mask": [1]}, {"input_ids": [1, 2], "attention_mask": [0, 1]}]
    assert collate_rows(rows)["attention_mask"].tolist() == [[1, 0], [0, 1]]


def test_other_names_need_a_number():
    rows = [{"input_ids": [1], "weights": [2]}, {"input_ids": [1, 2], "weights": [2, 3]}]
    assert collate_rows(rows, padded_with={"weights": 0})["weights"].tolist() == [[2, 0], [2, 3]]
    for wrong in (rows, [SHORT, {"input_ids": [1]}], [{"input_ids": [1, 2], "labels": [1]}]):
        with pytest.raises(DataError) as caught:
            collate_rows(wrong)
        assert caught.value.slugs == ("unequal-rows",)


def test_rows_without_sequences_are_collated_as_torch_does():
    batch = collate_rows([{"image": torch.ones(2, 2), "label": 1}, {"image": torch.zeros(2, 2), "label": 0}])
    assert batch["image"].shape == (2, 2, 2) and batch["label"].tolist() == [1, 0] and "attention_mask" not in batch
