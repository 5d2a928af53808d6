"""Padding of rows to one length."""

from __future__ import annotations

import pytest
import torch

from parallelize.base.errors import DataError
from parallelize.training.data.collate import collate_rows

SHORT = {"input_ids": [5, 6], "labels": torch.tensor([5, 6]), "position_ids": [0, 1], "id": 7}
LONG = {"input_ids": [1, 2, 3], "labels": torch.tensor([1, 2, 3]), "position_ids": [0, 1, 2], "id": 8}


def test_rows_are_padded_to_the_longest_one_and_masked():
    batch = collate_rows([SHORT, LONG], pad_id=9, multiple_of=4)
    assert {name: value.tolist() for name, value in batch.items()} == {
        "input_ids": [[5, 6, 9, 9], [1, 2, 3, 9]],
        "labels": [[5, 6, -100, -100], [1, 2, 3, -100]],
        "position_ids": [[0, 1, 0, 1], [0, 1, 2, 0]],
        "id": [7, 8],
        "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 0]],
    }


def test_rows_of_one_length_get_no_mask():
    assert set(collate_rows([LONG, LONG])) == {*LONG}
    assert collate_rows([LONG, LONG], multiple_of=2)["attention_mask"].tolist() == [[1, 1, 1, 0]] * 2


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


def test_rows_of_several_documents_get_no_mask():
    """A mask would turn the detection of packed documents off."""
    rows = [
        {"input_ids": [1, 2, 3], "position_ids": torch.tensor([0, 1, 0])},
        {"input_ids": [4], "position_ids": torch.tensor([0])},
    ]
    batch = collate_rows(rows)
    assert "attention_mask" not in batch and batch["position_ids"].tolist() == [[0, 1, 0], [0, 0, 1]]


def test_an_empty_row_keeps_ids_whole_numbers():
    batch = collate_rows([{"input_ids": [2**24 + 1, 2]}, {"input_ids": []}])
    assert batch["input_ids"].dtype == torch.int64 and batch["input_ids"].tolist() == [[2**24 + 1, 2], [0, 0]]
