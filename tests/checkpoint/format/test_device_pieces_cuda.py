"""Boxes of files through pinned memory to a GPU: the values of the file, also where pieces are reused many times."""

from __future__ import annotations

import pytest
import torch

from parallelize.checkpoint.format.device_pieces import PIECE_BYTES
from tests.checkpoint.format.test_device_pieces import checked_differences, differences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("piece_bytes", [24, 1000, PIECE_BYTES])
def test_every_kind_of_box(tmp_path, piece_bytes):
    assert differences("cuda", tmp_path, piece_bytes=piece_bytes) == []


def test_a_tensor_of_many_pieces(tmp_path):
    """300 MB: each slot is read into again while its last copy may be under way."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(20_000, 8192, generator=generator).to(torch.bfloat16)[:, :7500].contiguous()}
    boxes = {"a": [((0, 20_000), (0, 7500)), ((0, 20_000), (100, 3000))]}
    torch.cuda._sleep(1_000_000_000)  # so that copies are behind the reads
    assert differences("cuda", tmp_path, tensors, boxes, PIECE_BYTES) == []


def test_runs_of_bytes_are_compared_with_digests(tmp_path, monkeypatch):
    assert checked_differences("cuda", tmp_path, monkeypatch) == []
