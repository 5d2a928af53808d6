"""Boxes of files by pieces: the values of a plain read, for every kind of box, and errors that leave no thread reading."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from parallelize.checkpoint.format.boxes import full_box, shape_of
from parallelize.checkpoint.format.device_pieces import DevicePieces
from parallelize.checkpoint.format.reader import TensorFile

TENSORS = {
    "matrix": torch.arange(700 * 33, dtype=torch.float32).view(700, 33).to(torch.bfloat16),
    "cube": torch.arange(50 * 4 * 9, dtype=torch.float64).view(50, 4, 9),
    "vector": torch.arange(5000),
    "scalar": torch.tensor(3.0),
}
BOXES = {
    "matrix": [((0, 700), (0, 33)), ((5, 6), (0, 33)), ((10, 690), (3, 20)), ((0, 700), (32, 33))],
    "cube": [((0, 50), (0, 4), (0, 9)), ((1, 49), (1, 3), (2, 9))],
    "vector": [((0, 5000),), ((17, 4321),)],
    "scalar": [()],
}


def differences(device: str, folder, tensors=TENSORS, boxes=BOXES, piece_bytes: int = 1000) -> list[str]:
    """What a read by pieces gets otherwise than a slice of the tensor."""
    save_file(tensors, folder / "file.safetensors")
    wrong = []
    with TensorFile(folder, "file.safetensors") as file:
        pieces = DevicePieces(torch.device(device), piece_bytes)
        file._buffers.pieces = lambda _: pieces  # type: ignore[method-assign]
        for name, tensor in tensors.items():
            for box in boxes.get(name, [full_box(tuple(tensor.shape))]):
                expected = tensor[tuple(slice(*side) for side in box)]
                for dtype in {tensor.dtype, torch.float32}:
                    # a view of something wider, as a shard of a packed weight is
                    out = torch.zeros((*shape_of(box), 2), dtype=dtype, device=device)[..., 0]
                    was_read = file._read_by_pieces(file.entry(name), box, out)
                    if was_read is (box == ()) or (was_read and not torch.equal(out.cpu(), expected.to(dtype))):
                        wrong.append(f"{name} {box} {dtype}")
    return wrong


def test_every_kind_of_box(tmp_path):
    assert differences("cpu", tmp_path) == []


def test_rows_that_are_larger_than_a_piece(tmp_path):
    """As those of stacked experts."""
    assert differences("cpu", tmp_path, piece_bytes=24) == []


def test_after_an_error_nothing_is_read_any_more():
    pieces, out = DevicePieces(torch.device("cpu"), 8), torch.zeros(100)
    reading, lock = [0], threading.Lock()

    def read(box, memory) -> None:
        with lock:
            reading[0] += 1
        try:
            if box[0][0] == 20:
                raise OSError("gone")
            if box[0][0] > 20:
                time.sleep(0.05)
            memory[:] = b"\x01" * len(memory)
        finally:
            with lock:
                reading[0] -= 1

    with pytest.raises(OSError, match="gone"):
        pieces.fill(read, ((0, 100),), torch.float32, out)
    assert reading == [0] and bool(out[:20].all()) and not bool(out[22:].any())
