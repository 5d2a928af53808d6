"""The header of a safetensors file: read with suspicion, written as the format asks.

    8 bytes: N, little endian | N bytes of JSON: name -> dtype, shape, data_offsets | the tensors, one after another

Nothing may overlap, and nothing may be left over: every byte of the file belongs to the header or to one tensor. Torch-free.

Source: the format's description, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallelize.checkpoint.dtypes import SIZES
from parallelize.checkpoint.strict_json import read_json, write_json
from parallelize.errors import CheckpointError, Problem

MOST_HEADER_BYTES = 100_000_000  # as upstream has it
METADATA = "__metadata__"
_STEP_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. `start`: of its first byte, counted from the file's begin."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def item_bytes(self) -> int:
        return SIZES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class FileInfo:
    """A file as it was written: its size, and the digest of its header, which holds the digests of all the rest."""

    name: str
    num_bytes: int
    header: str


@dataclass(frozen=True)
class Header:
    """What a file holds. `raw`: its first bytes, up to the first tensor."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    raw: bytes


def read_header(descriptor: int, size: int, where: str) -> Header:
    """Raises: CheckpointError `truncated-file`, `bad-header`, `bad-json` naming the file, and the tensor where it is one."""
    if size < 8:
        raise CheckpointError(Problem("truncated-file", f"has {size} bytes, too few for a header", where))
    length = int.from_bytes(_read(descriptor, 0, 8, where), "little")
    if length > min(MOST_HEADER_BYTES, size - 8):
        what = f"says that its header has {length} bytes, and the file has {size}"
        raise CheckpointError(Problem("bad-header", what, where, fix="the file is damaged or cut off: get it anew"))
    text = _text(descriptor, 8, length, where)
    found = read_json(text, where)
    if not text.startswith(b"{") or not isinstance(found, dict):
        raise CheckpointError(Problem("bad-header", "the header is not a JSON object", where))
    metadata = _metadata(found.pop(METADATA, {}), where)
    entries = {name: _entry(name, given, 8 + length, where) for name, given in found.items()}
    _check_cover(entries, 8 + length, size, where)
    return Header(entries, metadata, length.to_bytes(8, "little") + text)


def _read(descriptor: int, start: int, length: int, where: str) -> bytes:
    found = b""
    while len(found) < length:
        more = os.pread(descriptor, length - len(found), start + len(found))
        if not more:
            raise CheckpointError(Problem("truncated-file", f"ends at byte {start + len(found)}", where))
        found += more
    return found


def _text(descriptor: int, start: int, length: int, where: str) -> bytes:
    """JSON has no NUL, and a sparse file nothing else: it cannot make this read much."""
    parts = []
    for at in range(0, length, _STEP_BYTES):
        parts.append(_read(descriptor, start + at, min(_STEP_BYTES, length - at), where))
        if b"\0" in parts[-1]:
            raise CheckpointError(Problem("bad-header", "the header has NUL bytes", where, fix="get the file anew"))
    return b"".join(parts)


def _metadata(given: Any, where: str) -> dict[str, str]:
    fine = isinstance(given, dict) and all(isinstance(value, str) for value in given.values())
    if not fine:
        raise CheckpointError(Problem("bad-header", f"{METADATA} is not text by name", where))
    return given


def _entry(name: str, given: Any, data: int, where: str) -> Entry:
    """An entry whose own numbers make sense."""

    def bad(what: str) -> CheckpointError:
        return CheckpointError(Problem("bad-header", f"tensor {name[:120]!r} {what}", where))

    if not isinstance(given, dict) or set(given) != {"dtype", "shape", "data_offsets"}:
        raise bad("needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise bad(f"has the dtype {str(dtype)[:40]!r}, which is not known")
    if not _numbers(shape, 64) or not _numbers(offsets, 2) or len(offsets) != 2:
        raise bad("has a shape or offsets that are no such thing")
    start, stop = offsets
    if stop - start != math.prod(shape) * SIZES[dtype]:
        raise bad(f"of {dtype} {shape} has offsets {offsets}, which are {stop - start} bytes")
    return Entry(name, dtype, tuple(shape), data + start)


def _numbers(given: Any, most: int) -> bool:
    fine = isinstance(given, list) and len(given) <= most
    return fine and all(type(number) is int and 0 <= number < 1 << 62 for number in given)


def _check_cover(entries: dict[str, Entry], data: int, size: int, where: str) -> None:
    at = data
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != at:
            what = "overlaps another" if entry.start < at else "does not begin where the one before ends"
            raise CheckpointError(Problem("bad-header", f"tensor {entry.name[:120]!r} {what}", where))
        at += entry.num_bytes
    if at != size:
        slug = "truncated-file" if size < at else "bad-header"
        what = f"has {size} bytes, and its header describes {at}"
        raise CheckpointError(Problem(slug, what, where, fix="the file is damaged or cut off: get it anew"))


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Header:
    """The header of a file that holds these (dtype, shape), one after another in this order."""
    described: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at, entries = 0, []
    for name, (dtype, shape) in tensors.items():
        entry = Entry(name, dtype, tuple(shape), at)
        entries.append(entry)
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + entry.num_bytes]}
        at += entry.num_bytes
    text = write_json(described)
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8
    raw = len(text).to_bytes(8, "little") + text
    placed = {e.name: Entry(e.name, e.dtype, e.shape, len(raw) + e.start) for e in entries}
    return Header(placed, dict(metadata), raw)
