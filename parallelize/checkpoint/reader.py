"""Reading boxes of tensors out of a safetensors file: the bytes that are wanted, checked by hash where there is one."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint.boxes import Box, contains, runs, shape_of, slices_of, volume
from parallelize.checkpoint.digests import BLOCK_BYTES, digest_of, digests_in
from parallelize.checkpoint.header import Entry, FileInfo, Header, read_header
from parallelize.checkpoint.memory import Scratch, bytes_of, torch_dtype
from parallelize.checkpoint.paths import open_file
from parallelize.errors import CheckpointError, Problem

T = torch.Tensor
_STEP_BYTES = 8 << 20
_MAPPED_BELOW = 1 << 16  # shorter runs are copied out of a mapping: a call for each would take longer


class Buffers:
    """What reading needs beside its target; files that are read one after another share it."""

    def __init__(self) -> None:
        self.between, self.blocks = Scratch(), Scratch()


class TensorFile:
    """A safetensors file. Close it, or use `with`; reading opens it again.

    Attributes:
        header: what it holds. bytes_read: of tensors, since it was opened.
    """

    def __init__(self, folder: Path, name: str, expected: FileInfo | None = None, buffers: Buffers | None = None):
        """Raises: CheckpointError of `open_file` and `read_header`; `wrong-size`, `corrupt-header` where it is not the file
        that a manifest describes."""
        self.path = folder / name
        self._descriptor, self.size = open_file(folder, name)
        self.bytes_read = 0
        self._buffers = buffers or Buffers()
        self._checked_blocks: set[tuple[str, int]] = set()
        try:
            self.header = self._checked(expected)
            sizes = {entry.name: entry.num_bytes for entry in self.header.entries.values()}
            self._digests = digests_in(self.header.metadata, sizes, str(self.path))
        except BaseException:
            self.close()
            raise

    def _checked(self, expected: FileInfo | None) -> Header:
        if expected is not None and self.size != expected.num_bytes:
            what = f"has {self.size} bytes, and was written with {expected.num_bytes}"
            raise CheckpointError(Problem("wrong-size", what, str(self.path), fix="the file is cut off or replaced"))
        header = read_header(self._descriptor, self.size, str(self.path))
        if expected is not None and digest_of(header.raw) != expected.header:
            rows = (("expected", expected.header), ("found", digest_of(header.raw)))
            what = "its header is not the one that was written"
            raise CheckpointError(Problem("corrupt-header", what, str(self.path), rows, "restore the file from a copy"))
        return header

    @property
    def has_digests(self) -> bool:
        return self._digests is not None

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _opened(self) -> int:
        if self._descriptor < 0:
            self._descriptor, size = open_file(self.path.parent, self.path.name)
            if size != self.size:
                what = f"has {size} bytes, and had {self.size} when it was opened first"
                raise CheckpointError(
                    Problem("wrong-size", what, str(self.path), fix="do not change files that are read")
                )
        return self._descriptor

    def entry(self, name: str) -> Entry:
        """Raises: CheckpointError `missing-tensor`."""
        if name not in self.header.entries:
            raise CheckpointError(Problem("missing-tensor", f"holds no tensor {name!r}", str(self.path)))
        return self.header.entries[name]

    def read(self, name: str, box: Box, out: T, check: bool = True) -> None:
        """Copy a box of a tensor into `out`, which has its shape; other dtypes are converted, other devices reached.

        check: hash each block that is touched, and read it whole for that; without digests in the file nothing is checked.

        Raises: CheckpointError `corrupt-tensor` with file, tensor and digests; `truncated-file`.
        """
        entry = self.entry(name)
        assert contains(entry.shape, box) and tuple(out.shape) == shape_of(box), (name, entry.shape, box, out.shape)
        if volume(box) == 0:
            return
        plain = out.is_contiguous() and not out.is_conj() and not out.is_neg()
        if out.device.type == "cpu" and plain and out.dtype == torch_dtype(entry.dtype):
            self._read_into(entry, box, bytes_of(out), check)
            return
        between = self._buffers.between.of(volume(box) * entry.item_bytes)
        self._read_into(entry, box, bytes_of(between), check)
        out.copy_(between.view(torch_dtype(entry.dtype)).view(shape_of(box)))

    def _read_into(self, entry: Entry, box: Box, data: memoryview, check: bool) -> None:
        along, item = runs(entry.shape, box), entry.item_bytes
        first, last = along.span
        checked = check and self._digests is not None
        if along.is_one and checked:
            self._read_checked(entry, first * item, data)
        elif along.is_one:
            self._read_bytes(entry.start + first * item, data)
        elif checked:
            around = self._whole_blocks(entry, first * item, last * item)
            self._cut_out(around, entry, box, first * item // BLOCK_BYTES * BLOCK_BYTES, data)
        elif along.length * item >= _MAPPED_BELOW:
            length, at = along.length * item, 0
            for offset in along.offsets():
                self._read_bytes(entry.start + offset * item, data[at : at + length])
                at += length
        else:
            self._copy_mapped(entry, box, data)

    # -- plain bytes ----------------------------------------------------------------------------------------------

    def _read_bytes(self, start: int, data: memoryview) -> None:
        at = 0
        while at < len(data):
            try:
                done = os.preadv(self._opened(), [data[at : at + _STEP_BYTES]], start + at)
            except OSError as error:
                what = f"byte {start + at} cannot be read: {error.strerror}"
                raise CheckpointError(Problem("unreadable-file", what, str(self.path))) from error
            if done == 0:
                what = f"ends at byte {start + at}, inside a tensor"
                raise CheckpointError(Problem("truncated-file", what, str(self.path)))
            at += done
        self.bytes_read += len(data)

    def _copy_mapped(self, entry: Entry, box: Box, data: memoryview) -> None:
        """Short runs, out of the page cache. Pages around them may be read as well; the next rank will want those."""
        page = mmap.ALLOCATIONGRANULARITY
        begin = entry.start // page * page
        with mmap.mmap(
            self._opened(),
            entry.start + entry.num_bytes - begin,
            mmap.MAP_PRIVATE,
            mmap.PROT_READ | mmap.PROT_WRITE,
            offset=begin,
        ) as mapped:
            whole = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start - begin)
            _copy_box(whole, entry, box, data)
            del whole
        self.bytes_read += len(data)

    # -- checked bytes --------------------------------------------------------------------------------------------

    def _read_checked(self, entry: Entry, start: int, data: memoryview) -> None:
        """One run of a tensor: whole blocks in place, the two at its ends by a buffer."""
        stop, at = start + len(data), start
        while at < stop:
            block = at // BLOCK_BYTES
            begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, entry.num_bytes)
            if begin == at and end <= stop:
                view = data[at - start : end - start]
                self._read_bytes(entry.start + begin, view)
                self._check(entry, block, view)
            else:
                held = bytes_of(self._buffers.blocks.of(end - begin))
                self._read_bytes(entry.start + begin, held)
                self._check(entry, block, held)
                data[at - start : min(end, stop) - start] = held[at - begin : min(end, stop) - begin]
            at = min(end, stop)

    def _whole_blocks(self, entry: Entry, start: int, stop: int) -> T:
        """Every block that [start, stop) of a tensor touches, checked."""
        begin = start // BLOCK_BYTES * BLOCK_BYTES
        end = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, entry.num_bytes)
        held = self._buffers.blocks.of(end - begin)
        self._read_checked(entry, begin, bytes_of(held))
        return held

    def _cut_out(self, around: T, entry: Entry, box: Box, begin: int, data: memoryview) -> None:
        """A box out of a run of the tensor's bytes that begins at byte `begin`."""
        outer = math.prod(entry.shape[1:]) * entry.item_bytes  # bytes of a row
        first = box[0][0]
        rows = box[0][1] - first
        skipped = first * outer - begin
        if skipped >= 0 and skipped + rows * outer <= around.numel():
            part = Entry(entry.name, entry.dtype, (rows, *entry.shape[1:]), 0)
            _copy_box(around[skipped : skipped + rows * outer], part, ((0, rows), *box[1:]), data)
            return
        along, at = runs(entry.shape, box), 0  # the first or last row is not whole
        held, length = bytes_of(around), runs(entry.shape, box).length * entry.item_bytes
        for offset in along.offsets():
            place = offset * entry.item_bytes - begin
            data[at : at + length] = held[place : place + length]
            at += length

    def _check(self, entry: Entry, block: int, data: memoryview) -> None:
        assert self._digests is not None
        expected, found = self._digests[entry.name][block], digest_of(data)
        if found != expected:
            first = block * BLOCK_BYTES
            rows = (
                ("tensor", entry.name),
                ("bytes", f"{first:,} to {first + len(data):,} of it"),
                ("expected", expected),
                ("found", found),
            )
            fix = "restore the file from a copy, or load another step"
            raise CheckpointError(
                Problem("corrupt-tensor", f"{entry.name} is not what was written", str(self.path), rows, fix)
            )

    def check_box(self, name: str, box: Box) -> int:
        """Compare the hashes of all blocks that a box touches, each block once in this file's life; the bytes looked at.

        Raises: CheckpointError `corrupt-tensor`, `truncated-file`.
        """
        entry, done = self.entry(name), 0
        if volume(box) == 0 or self._digests is None:
            return 0
        first, last = runs(entry.shape, box).span
        for block in range(first * entry.item_bytes // BLOCK_BYTES, -(-last * entry.item_bytes // BLOCK_BYTES)):
            if (name, block) not in self._checked_blocks:
                begin = block * BLOCK_BYTES
                held = bytes_of(self._buffers.blocks.of(min(BLOCK_BYTES, entry.num_bytes - begin)))
                self._read_bytes(entry.start + begin, held)
                self._check(entry, block, held)
                self._checked_blocks.add((name, block))
                done += len(held)
        return done

    def check_all(self, progress: Any = None) -> None:
        """Read and hash every tensor. Raises: CheckpointError `corrupt-tensor`, `truncated-file`."""
        for entry in self.header.entries.values():
            for at in range(0, entry.num_bytes, BLOCK_BYTES):
                held = bytes_of(self._buffers.blocks.of(min(BLOCK_BYTES, entry.num_bytes - at)))
                self._read_checked(entry, at, held) if self.has_digests else self._read_bytes(entry.start + at, held)
                if progress is not None:
                    progress(len(held))


def _copy_box(whole: T, entry: Entry, box: Box, data: memoryview) -> None:
    """Copy a box of a tensor, given as all its bytes, into memory. In bytes: a file does not align its tensors."""
    shape = (*entry.shape[:-1], entry.shape[-1] * entry.item_bytes)
    last = (box[-1][0] * entry.item_bytes, box[-1][1] * entry.item_bytes)
    cut = whole.view(shape)[slices_of((*box[:-1], last))]
    torch.frombuffer(data, dtype=torch.uint8).view(cut.shape).copy_(cut)
