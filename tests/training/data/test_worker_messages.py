"""What workers send arrives as it was, in one buffer, with as few file descriptors as messages."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from parallelize.training.data.iterable_batches import IterableBatches, packed, unpacked
from tests.training.data.test_iterable_batches import first

DTYPES = [torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint16, torch.complex128]


@dataclass
class Sample:
    ids: torch.Tensor
    name: str


def comparable(tensor):
    """torch compares no tensors of eight-bit floating point."""
    return tensor.double() if tensor.dtype.itemsize == 1 else tensor


def test_tensors_of_all_dtypes_and_shapes_arrive_as_they_were():
    drawn = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)) * 9
    values = [drawn.to(dtype) for dtype in DTYPES] + [drawn.t(), drawn[2:5, 1], torch.tensor(5), torch.empty(0, 4)]
    values += [torch.complex(drawn, drawn).conj()]
    made = unpacked(packed(values))
    for expected, actual in zip(values, made, strict=True):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        assert torch.equal(comparable(actual), comparable(expected))
    assert len({value.untyped_storage().data_ptr() for value in made if value.numel()}) == 1


def test_tensors_inside_of_any_object_are_packed_and_the_same_one_stays_the_same():
    ids = torch.arange(4)
    value: Any = {"row": Sample(ids, "a"), "again": ids, "array": numpy.arange(3), "more": (None, [{"x": ids[1:]}])}
    made = unpacked(packed(value))
    assert made["row"].name == "a" and made["row"].ids.tolist() == [0, 1, 2, 3] and made["row"].ids is made["again"]
    assert made["array"].tolist() == [0, 1, 2] and made["more"][1][0]["x"].tolist() == [1, 2, 3]
    made["again"][1] = 9
    assert made["more"][1][0]["x"].tolist() == [1, 2, 3] and ids[1] == 1


def test_a_part_of_a_storage_is_sent_without_the_rest():
    message = packed([torch.zeros(1000, 1000)[0]])
    assert message.buffer.numel() == 4000 and len(message.pickled) < 1000


@pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning")
def test_what_is_no_plain_tensor_is_left_to_torch():
    value = {"sparse": torch.eye(2).to_sparse(), "parameter": nn.Parameter(torch.ones(2))}
    made = unpacked(packed(value))
    assert made["sparse"].to_dense().tolist() == [[1, 0], [0, 1]]
    assert isinstance(made["parameter"], nn.Parameter) and made["parameter"].tolist() == [1, 1]


@pytest.mark.sweep
def test_a_batch_may_have_more_samples_than_a_process_may_have_files():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(300, limits[1]), limits[1]))
    try:
        rows = [{name: torch.tensor([number, 7]) for name in ("ids", "labels")} for number in range(900)]
        loader = IterableBatches([rows], 400, repeat=False).loader(num_workers=1)
        batches = first(loader, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert batches[0]["ids"].tolist() == [[number, 7] for number in range(400)]
    assert batches[1]["labels"][-1].tolist() == [799, 7] and len(batches) == 2
