"""Tables of tensors keep none alive, and let PyTorch swap one."""

from __future__ import annotations

import gc

import pytest
import torch

from parallelize.state.records import mark_of, mark_parameter
from parallelize.state.tensor_tables import TensorTable, swappable


def test_a_table_knows_a_tensor_by_identity_and_not_for_longer_than_it_lives():
    table: TensorTable[str] = TensorTable()
    first, second = torch.ones(2), torch.ones(2)
    table[first] = "first"
    assert table.get(first) == "first" and table.get(second) is None
    assert [id(tensor) for tensor in table.tensors()] == [id(first)]
    del first
    gc.collect()
    assert len(table) == 0


def test_what_is_in_a_table_can_be_swapped_within_the_block_and_stays_in_it():
    table: TensorTable[str] = TensorTable()
    parameter = torch.nn.Parameter(torch.ones(2))
    table[parameter] = "value"
    mark_parameter(parameter, own=True)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.zeros(2).double()))
    with swappable([parameter]):
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.zeros(2).double()))
    assert parameter.dtype == torch.float64
    assert table.get(parameter) == "value" and mark_of(parameter).own
