"""Reading boxes of tensors from a safetensors file: only the bytes of the box, checked against digests if there are
any."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import torch

from parallelize.base.boxes import Box, contains, runs, shape_of, slices_of, volume
from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.digests import BLOCK_BYTES, digest_of, read_digests
from parallelize.base.files.paths import open_file
from parallelize.checkpoint.format.device_pieces import DevicePieces, Scratch, bytes_of, torch_dtype
from parallelize.checkpoint.format.header import FileInfo, Header, TensorEntry, read_header

T = torch.Tensor
_STEP_BYTES = 8 << 20
_MAPPED_BELOW = 1 << 16  # shorter runs are copied from a memory map: one system call per run is slower


class Buffers:
    """Memory for reading, shared by files that one thread reads one after another.

    Attributes:
        staging, blocks: of that thread.
        ends: of any thread that has `using_ends`: the first and last block of a run, of which a part is wanted.
    """

    def __init__(self) -> None:
        self.staging, self.blocks, self.ends = Scratch(), Scratch(), Scratch()
        self.using_ends = Lock()
        self._pieces: dict[torch.device, DevicePieces] = {}

    def pieces(self, device: torch.device) -> DevicePieces:
        """The pinned memory through which a device's tensors are filled."""
        if device not in self._pieces:
            self._pieces[device] = DevicePieces(device)
        return self._pieces[device]

    def finish(self) -> None:
        """Complete the outputs of reads that were not waited for. Raises: CheckpointError of `TensorFile.read`."""
        try:
            for pieces in self._pieces.values():
                pieces.finish()
        except BaseException:
            for pieces in self._pieces.values():
                pieces.abandon()
            raise

    def wait_for_reads(self) -> None:
        """Return when no thread reads from a file."""
        for pieces in self._pieces.values():
            pieces.wait_for_reads()


def goes_by_pieces(device: torch.device) -> bool:
    """Whether tensors on a device are filled through `DevicePieces`."""
    return device.type == "cuda"


class TensorFile:
    """A safetensors file. Close it, or use `with`. Reading reopens a closed file.

    Attributes:
        header: entries and metadata.
        bytes_read: bytes of tensors read so far.
    """

    def __init__(self, folder: Path, name: str, expected: FileInfo | None = None, buffers: Buffers | None = None):
        """
        Args:
            folder, name: folder and name of the file.
            expected: its size and header digest according to a manifest.
            buffers: shared with other files.

        Raises: CheckpointError of `open_file` and `read_header`; `wrong-size`, `corrupt-header` if it is not as
            `expected`.
        """
        self.path = folder / name
        self._descriptor, self.size = open_file(folder, name)
        self.bytes_read, self._counting = 0, Lock()
        self._buffers = buffers or Buffers()
        self._checked_blocks: set[tuple[str, int]] = set()
        self._map: mmap.mmap | None = None
        try:
            self.header = self._read_header(expected)
            sizes = {entry.name: entry.num_bytes for entry in self.header.entries.values()}
            self._digests = read_digests(self.header.metadata, sizes, str(self.path))
        except BaseException:
            self.close()
            raise

    def _read_header(self, expected: FileInfo | None) -> Header:
        if expected is not None and self.size != expected.num_bytes:
            what = f"has {self.size} bytes, and was written with {expected.num_bytes}"
            raise CheckpointError(Problem("wrong-size", what, str(self.path), fix="the file was truncated or replaced"))
        header = read_header(self._descriptor, self.size, str(self.path))
        if expected is not None and digest_of(header.raw) != expected.header:
            rows = (("expected", expected.header), ("found", digest_of(header.raw)))
            what = "its header does not match its digest"
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
        self._map = None
        if self._descriptor >= 0:
            self._buffers.wait_for_reads()
            os.close(self._descriptor)
            self._descriptor = -1

    def _count(self, num_bytes: int) -> None:
        with self._counting:  # of several threads
            self.bytes_read += num_bytes

    def _opened(self) -> int:
        if self._descriptor < 0:
            self._descriptor, size = open_file(self.path.parent, self.path.name)
            if size != self.size:
                what = f"has {size} bytes, and had {self.size} when it was first opened"
                raise CheckpointError(
                    Problem("wrong-size", what, str(self.path), fix="do not change files while they are read")
                )
        return self._descriptor

    def entry(self, name: str) -> TensorEntry:
        """Raises: CheckpointError `missing-tensor`."""
        if name not in self.header.entries:
            raise CheckpointError(Problem("missing-tensor", f"has no tensor {name!r}", str(self.path)))
        return self.header.entries[name]

    def read(self, name: str, box: Box, out: T, check: bool = True, wait: bool = True) -> None:
        """Copy a box of a tensor into `out`.

        Args:
            name: the name of the tensor.
            box: a box of the tensor.
            out: a tensor with the shape of the box, of any dtype and on any device.
            check: compare each block that contains elements of the box with its digest, which reads these blocks fully.
                Without effect for a file without digests.
            wait: False, where `out` need not be complete before `Buffers.finish`: the next tensor is read meanwhile.

        Raises: CheckpointError `corrupt-tensor` with file, tensor and digests; `truncated-file`, `missing-tensor`.
        """
        entry = self.entry(name)
        assert contains(entry.shape, box) and tuple(out.shape) == shape_of(box), (name, entry.shape, box, out.shape)
        if volume(box) == 0:
            return
        check = check and self._digests is not None
        if goes_by_pieces(out.device) and self._read_by_pieces(entry, box, out, check):
            if wait:
                self._buffers.finish()
            return
        plain = out.is_contiguous() and not out.is_conj() and not out.is_neg()
        if out.device.type == "cpu" and plain and out.dtype == torch_dtype(entry.dtype):
            self._read_into(entry, box, bytes_of(out), check)
            return
        staging = self._buffers.staging.of(volume(box) * entry.item_bytes)
        self._read_into(entry, box, bytes_of(staging), check)
        out.copy_(staging.view(torch_dtype(entry.dtype)).view(shape_of(box)))

    def _read_by_pieces(self, entry: TensorEntry, box: Box, out: T, check: bool) -> bool:
        """Begin to read a box into a tensor on a device. False, and nothing is read, where it is one number, or not a
        run of the same bytes in file and tensor, and compared with digests.
        """
        if not box:
            return False
        layout, dtype = runs(entry.shape, box), torch_dtype(entry.dtype)
        if check and not (layout.is_contiguous and out.is_contiguous() and out.dtype == dtype):
            return False
        self._opened()  # by this thread
        pieces = self._buffers.pieces(out.device)
        if check:  # in pieces of full blocks
            span = layout.span[0] * entry.item_bytes, layout.span[1] * entry.item_bytes
            read_checked = lambda part, memory: self._read_checked(entry, part[0][0], memory)  # noqa: E731
            pieces.fill(read_checked, (span,), torch.uint8, out.view(-1).view(torch.uint8))
        else:
            pieces.fill(lambda part, memory: self._read_into(entry, part, memory, False), box, dtype, out)
        return True

    def _read_into(self, entry: TensorEntry, box: Box, data: memoryview, check: bool) -> None:
        layout, item_bytes = runs(entry.shape, box), entry.item_bytes
        start, stop = (index * item_bytes for index in layout.span)
        check = check and self._digests is not None
        if layout.is_contiguous and check:
            self._read_checked(entry, start, data)
        elif layout.is_contiguous:
            self._read_bytes(entry.start + start, data)
        elif check:
            blocks = self._read_blocks(entry, start, stop)
            self._extract_box(blocks, entry, box, start // BLOCK_BYTES * BLOCK_BYTES, data)
        elif layout.length * item_bytes >= _MAPPED_BELOW:
            length, at = layout.length * item_bytes, 0
            for offset in layout.offsets():
                self._read_bytes(entry.start + offset * item_bytes, data[at : at + length])
                at += length
        else:
            self._copy_mapped(entry, box, data)

    def mapped(self, name: str, box: Box) -> T | None:
        """A box of a tensor as a view of a private map of the file, which writes do not reach. None where it is not one
        run of bytes.

        The map lives as long as views of it, also after `close`. Pages are read when they are used first, and digests
        are not compared. Whoever truncates or overwrites the file meanwhile changes the values, or ends the process
        (SIGBUS).

        Raises: CheckpointError `missing-tensor`, `truncated-file`.
        """
        entry = self.entry(name)
        layout, dtype = runs(entry.shape, box), torch_dtype(entry.dtype)
        begin = entry.start + layout.span[0] * entry.item_bytes
        if volume(box) == 0 or not layout.is_contiguous or begin % entry.item_bytes:
            return None
        if self._map is None:
            descriptor = self._opened()
            if os.fstat(descriptor).st_size < self.size:
                what = f"has less than the {self.size} bytes that it had when it was opened"
                raise CheckpointError(Problem("truncated-file", what, str(self.path)))
            self._map = mmap.mmap(descriptor, self.size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        view = torch.frombuffer(self._map, dtype=dtype, count=volume(box), offset=begin)
        return view.view(shape_of(box))

    # -- without digests ----------------------------------------------------------------------------------------------

    def _read_bytes(self, start: int, data: memoryview) -> None:
        at = 0
        while at < len(data):
            try:
                count = os.preadv(self._opened(), [data[at : at + _STEP_BYTES]], start + at)
            except OSError as error:
                what = f"byte {start + at} cannot be read: {error.strerror}"
                raise CheckpointError(Problem("unreadable-file", what, str(self.path))) from error
            if count == 0:
                what = f"ends at byte {start + at}, inside a tensor"
                raise CheckpointError(Problem("truncated-file", what, str(self.path)))
            at += count
        self._count(len(data))

    def _copy_mapped(self, entry: TensorEntry, box: Box, data: memoryview) -> None:
        """Copy short runs from a memory map. This may read nearby pages, which other ranks are likely to need."""
        page = mmap.ALLOCATIONGRANULARITY
        begin = entry.start // page * page
        with mmap.mmap(
            self._opened(),
            entry.start + entry.num_bytes - begin,
            mmap.MAP_PRIVATE,
            mmap.PROT_READ | mmap.PROT_WRITE,
            offset=begin,
        ) as mapped:
            full = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start - begin)
            _copy_box(full, entry, box, data)
            del full  # the map cannot be closed while a tensor uses it
        self._count(len(data))

    # -- checked by digest --------------------------------------------------------------------------------------------

    def _read_checked(self, entry: TensorEntry, start: int, data: memoryview) -> None:
        """Read one run of a tensor. Blocks inside the run are read in place, those at its two ends through a buffer."""
        stop, at = start + len(data), start
        while at < stop:
            block = at // BLOCK_BYTES
            begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, entry.num_bytes)
            if begin == at and end <= stop:
                view = data[at - start : end - start]
                self._read_bytes(entry.start + begin, view)
                self._check(entry, block, view)
            else:
                with self._buffers.using_ends:
                    content = bytes_of(self._buffers.ends.of(end - begin))
                    self._read_bytes(entry.start + begin, content)
                    self._check(entry, block, content)
                    data[at - start : min(end, stop) - start] = content[at - begin : min(end, stop) - begin]
            at = min(end, stop)

    def _read_blocks(self, entry: TensorEntry, start: int, stop: int) -> T:
        """Read and check every block that overlaps the bytes [start, stop) of a tensor."""
        begin = start // BLOCK_BYTES * BLOCK_BYTES
        end = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, entry.num_bytes)
        blocks = self._buffers.blocks.of(end - begin)
        self._read_checked(entry, begin, bytes_of(blocks))
        return blocks

    def _extract_box(self, blocks: T, entry: TensorEntry, box: Box, begin: int, data: memoryview) -> None:
        """Copy a box from consecutive bytes of the tensor, which begin at its byte `begin`."""
        row_bytes = math.prod(entry.shape[1:]) * entry.item_bytes
        first = box[0][0]
        rows = box[0][1] - first
        skipped = first * row_bytes - begin
        if skipped >= 0 and skipped + rows * row_bytes <= blocks.numel():
            part = TensorEntry(entry.name, entry.dtype, (rows, *entry.shape[1:]), 0)
            _copy_box(blocks[skipped : skipped + rows * row_bytes], part, ((0, rows), *box[1:]), data)
            return
        # `blocks` does not contain a part of the first or last row that is outside the box
        layout, content, at = runs(entry.shape, box), bytes_of(blocks), 0
        length = layout.length * entry.item_bytes
        for offset in layout.offsets():
            start = offset * entry.item_bytes - begin
            data[at : at + length] = content[start : start + length]
            at += length

    def _check(self, entry: TensorEntry, block: int, data: memoryview) -> None:
        assert self._digests is not None
        expected, actual = self._digests[entry.name][block], digest_of(data)
        if actual != expected:
            first = block * BLOCK_BYTES
            rows = (
                ("tensor", entry.name),
                ("bytes", f"{first:,} to {first + len(data):,} of it"),
                ("expected", expected),
                ("found", actual),
            )
            fix = "restore the file from a copy, or load another step"
            raise CheckpointError(
                Problem("corrupt-tensor", f"{entry.name} does not match its digest", str(self.path), rows, fix)
            )

    def check_box(self, name: str, box: Box) -> int:
        """Check all blocks that contain elements of a box against their digests. Each block is checked once per object.

        Returns: the number of bytes read.
        Raises: CheckpointError `corrupt-tensor`, `truncated-file`.
        """
        entry, num_bytes = self.entry(name), 0
        if volume(box) == 0 or self._digests is None:
            return 0
        first, stop = runs(entry.shape, box).span
        for block in range(first * entry.item_bytes // BLOCK_BYTES, -(-stop * entry.item_bytes // BLOCK_BYTES)):
            if (name, block) not in self._checked_blocks:
                begin = block * BLOCK_BYTES
                content = bytes_of(self._buffers.blocks.of(min(BLOCK_BYTES, entry.num_bytes - begin)))
                self._read_bytes(entry.start + begin, content)
                self._check(entry, block, content)
                self._checked_blocks.add((name, block))
                num_bytes += len(content)
        return num_bytes

    def check_all(self, progress: Callable[[int], None] | None = None) -> None:
        """Read every tensor and check it against its digests. Raises: CheckpointError `corrupt-tensor`,
        `truncated-file`."""
        for entry in self.header.entries.values():
            for at in range(0, entry.num_bytes, BLOCK_BYTES):
                content = bytes_of(self._buffers.blocks.of(min(BLOCK_BYTES, entry.num_bytes - at)))
                if self.has_digests:
                    self._read_checked(entry, at, content)
                else:
                    self._read_bytes(entry.start + at, content)
                if progress is not None:
                    progress(len(content))


def _copy_box(full: T, entry: TensorEntry, box: Box, data: memoryview) -> None:
    """Copy a box of a tensor into memory. `full`: all bytes of the tensor. Works on bytes: files do not align
    tensors."""
    shape = (*entry.shape[:-1], entry.shape[-1] * entry.item_bytes)
    last = (box[-1][0] * entry.item_bytes, box[-1][1] * entry.item_bytes)
    part = full.view(shape)[slices_of((*box[:-1], last))]
    torch.frombuffer(data, dtype=torch.uint8).view(part.shape).copy_(part)
