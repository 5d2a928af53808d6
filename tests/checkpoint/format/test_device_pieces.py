"""Boxes of files by pieces: the values of a plain read, for every kind of box, and errors that leave no thread
reading."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from parallelize.base.boxes import full_box, shape_of
from parallelize.base.errors import CheckpointError
from parallelize.base.files import digests
from parallelize.checkpoint.format import reader, writer
from parallelize.checkpoint.format.device_pieces import DevicePieces, code_of
from parallelize.checkpoint.format.reader import TensorFile
from parallelize.checkpoint.format.writer import TensorToWrite, write_tensors

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
                    was_read = file._read_by_pieces(file.entry(name), box, out, check=False)
                    pieces.finish()
                    if was_read is (box == ()) or (was_read and not torch.equal(out.cpu(), expected.to(dtype))):
                        wrong.append(f"{name} {box} {dtype}")
    return wrong


def test_every_kind_of_box(tmp_path):
    assert differences("cpu", tmp_path) == []


def test_rows_that_are_larger_than_a_piece(tmp_path):
    """As those of stacked experts."""
    assert differences("cpu", tmp_path, piece_bytes=24) == []


def checked_file(folder, monkeypatch, tensors=TENSORS) -> TensorFile:
    """A file with digests of blocks of 128 bytes."""
    for module in (digests, reader, writer):
        monkeypatch.setattr(module, "BLOCK_BYTES", 128)
    rows = [TensorToWrite(name, code_of(t.dtype) or "", tuple(t.shape), lambda t=t: t) for name, t in tensors.items()]
    write_tensors(folder / "checked.safetensors", rows)
    return TensorFile(folder, "checked.safetensors")


def by_pieces(file: TensorFile, monkeypatch, device: str, piece_bytes: int) -> DevicePieces:
    """All reads of a file into tensors of this device go through pieces, on the CPU too."""
    pieces = DevicePieces(torch.device(device), piece_bytes)
    monkeypatch.setattr(file._buffers, "pieces", lambda _: pieces)
    return pieces


def checked_differences(device: str, folder, monkeypatch) -> list[str]:
    """What reads that are compared with digests, and not waited for, get otherwise than slices of the tensors."""
    outputs = []
    with checked_file(folder, monkeypatch) as file:
        pieces = by_pieces(file, monkeypatch, device, 256)
        for name, tensor in TENSORS.items():
            for box in BOXES[name]:
                expected = tensor[tuple(slice(*side) for side in box)]
                out = torch.zeros_like(expected, memory_format=torch.contiguous_format).to(device)
                if file._read_by_pieces(file.entry(name), box, out, check=True):
                    outputs.append((f"{name} {box}", out, expected))
        pieces.finish()
    assert len(outputs) == 5  # runs of bytes
    return [where for where, out, expected in outputs if not torch.equal(out.cpu(), expected)]


def test_runs_of_bytes_are_compared_with_digests(tmp_path, monkeypatch):
    assert checked_differences("cpu", tmp_path, monkeypatch) == []


@pytest.mark.parametrize("at", [0, 1, 3000, 5000 * 8 - 1])
def test_a_changed_byte_is_named(tmp_path, monkeypatch, at):
    with checked_file(tmp_path, monkeypatch) as file:
        entry = file.entry("vector")
        pieces = by_pieces(file, monkeypatch, "cpu", 256)
        with open(file.path, "r+b") as raw:
            raw.seek(entry.start + at)
            (byte,) = raw.read(1)
            raw.seek(entry.start + at)
            raw.write(bytes([byte ^ 1]))
        with pytest.raises(CheckpointError, match="vector") as raised:
            file._read_by_pieces(entry, ((0, 5000),), torch.zeros(5000, dtype=torch.int64), check=True)
            pieces.finish()
    (problem,) = raised.value.problems
    first = at // 128 * 128
    assert (
        problem.slug == "corrupt-tensor"
        and ("bytes", f"{first:,} to {min(first + 128, 40000):,} of it") in problem.rows
    )


def test_a_converted_or_scattered_box_is_not_compared_by_pieces(tmp_path, monkeypatch):
    with checked_file(tmp_path, monkeypatch) as file:
        by_pieces(file, monkeypatch, "cpu", 256)
        cube = file.entry("cube")
        assert not file._read_by_pieces(cube, ((0, 50), (0, 4), (0, 9)), torch.zeros(50, 4, 9), check=True)
        assert not file._read_by_pieces(
            cube, ((0, 50), (1, 3), (0, 9)), torch.zeros(50, 2, 9, dtype=torch.float64), check=True
        )


@pytest.mark.parametrize("read", ["a live tensor is checked", "a scattered box is read"])
def test_a_thread_keeps_its_block_while_others_are_read(tmp_path, monkeypatch, read):
    """The first block of a shard is checked and then copied in part."""
    with checked_file(tmp_path, monkeypatch) as file:
        pieces, out = by_pieces(file, monkeypatch, "cpu", 256), torch.zeros(183, dtype=torch.int64)
        checked, go_on, check = threading.Event(), threading.Event(), file._check

        def check_slowly(entry, block: int, data: memoryview) -> None:
            check(entry, block, data)
            if entry.name == "vector" and block == 1:
                checked.set()
                assert go_on.wait(20)

        monkeypatch.setattr(file, "_check", check_slowly)
        assert file._read_by_pieces(file.entry("vector"), ((17, 200),), out, check=True)
        assert checked.wait(20)
        if read == "a live tensor is checked":
            file.check_box("matrix", ((0, 700), (0, 33)))
        else:
            part = torch.zeros(50, 2, 9, dtype=torch.float64)
            file.read("cube", ((0, 50), (1, 3), (0, 9)), part)
            assert torch.equal(part, TENSORS["cube"][:, 1:3])
        go_on.set()
        pieces.finish()
    assert torch.equal(out, TENSORS["vector"][17:200])


def test_a_closed_file_is_not_read_any_more(tmp_path):
    """Another file may get its descriptor. What was read is copied afterwards."""
    save_file(TENSORS, tmp_path / "file.safetensors")
    file = TensorFile(tmp_path, "file.safetensors")
    pieces, out = file._buffers.pieces(torch.device("cpu")), torch.zeros(5000, dtype=torch.int64)
    running, read_bytes = [0], file._read_bytes

    def slowly(start: int, data: memoryview) -> None:
        running[0] += 1
        time.sleep(0.1)
        read_bytes(start, data)
        running[0] -= 1

    file._read_bytes = slowly  # type: ignore[method-assign]
    file._read_by_pieces(file.entry("vector"), ((0, 5000),), out, check=False)
    file.close()
    assert running == [0] and file._descriptor == -1
    pieces.finish()
    assert torch.equal(out, TENSORS["vector"])


def test_threads_read_the_next_tensor_meanwhile():
    """A tensor of one piece would be read by one thread alone."""
    pieces = DevicePieces(torch.device("cpu"), 8)
    together = threading.Barrier(3, timeout=20)

    def read(box, memory) -> None:
        together.wait()
        memory[:] = bytes(memory.nbytes * [1])

    outputs = [torch.zeros(8, dtype=torch.uint8) for _ in range(3)]
    for out in outputs:
        pieces.fill(read, ((0, 8),), torch.uint8, out)
    pieces.finish()
    assert all(bool(out.all()) for out in outputs)


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
        pieces.finish()
    assert reading == [0] and bool(out[:20].all()) and not bool(out[22:].any())
