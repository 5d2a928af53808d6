"""Reading and writing the header of a safetensors file. The input is not trusted.

    8 bytes: N, little endian | N bytes of JSON: name -> dtype, shape, data_offsets | the tensors, one after another

Every byte of the file belongs to the header or to exactly one tensor. Does not import torch.

Source: the description of the format, https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.strict_json import read_json, write_json

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
METADATA = "__metadata__"
_STEP_BYTES = 1 << 20


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file. `start`: offset of its first byte in the file."""

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
    """A file as it was written: its size, and the digest of its header, which contains the digests of all blocks."""

    name: str
    num_bytes: int
    header: str


@dataclass(frozen=True)
class Header:
    """The parsed header of a file. `raw`: the bytes before the first tensor."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    raw: bytes


def read_header(descriptor: int, size: int, where: str) -> Header:
    """Read and check a header. Raises: CheckpointError `truncated-file`, `bad-header`, `bad-json`, with file and
    tensor."""
    if size < 8:
        raise CheckpointError(Problem("truncated-file", f"has {size} bytes, too few for a header", where))
    length = int.from_bytes(_read(descriptor, 0, 8, where), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        what = f"the header should have {length} bytes, and the file has {size}"
        raise CheckpointError(
            Problem("bad-header", what, where, fix="the file is damaged or truncated: copy or download it again")
        )
    text = _text(descriptor, 8, length, where)
    fields = read_json(text, where)
    if not text.startswith(b"{") or not isinstance(fields, dict):
        raise CheckpointError(Problem("bad-header", "the header is not a JSON object", where))
    metadata = _metadata(fields.pop(METADATA, {}), where)
    entries = {name: _entry(name, value, 8 + length, where) for name, value in fields.items()}
    _check_cover(entries, 8 + length, size, where)
    return Header(entries, metadata, length.to_bytes(8, "little") + text)


def _read(descriptor: int, start: int, length: int, where: str) -> bytes:
    data = b""
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), start + len(data))
        if not more:
            raise CheckpointError(Problem("truncated-file", f"ends at byte {start + len(data)}", where))
        data += more
    return data


def _text(descriptor: int, start: int, length: int, where: str) -> bytes:
    """Read the JSON. Stops at the first NUL byte, so that a sparse file with a huge length costs little memory."""
    parts = []
    for at in range(0, length, _STEP_BYTES):
        parts.append(_read(descriptor, start + at, min(_STEP_BYTES, length - at), where))
        if b"\0" in parts[-1]:
            raise CheckpointError(
                Problem("bad-header", "the header has NUL bytes", where, fix="copy or download it again")
            )
    return b"".join(parts)


def _metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError(Problem("bad-header", f"{METADATA} is not a map of names to text", where))
    return value


def _entry(name: str, value: Any, data_start: int, where: str) -> TensorEntry:
    """Parse one entry, and check that its dtype, shape and offsets are consistent."""

    def bad(what: str) -> CheckpointError:
        return CheckpointError(Problem("bad-header", f"tensor {name[:120]!r} {what}", where))

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise bad("needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise bad(f"has the dtype {str(dtype)[:40]!r}, which is unknown")
    if not _numbers(shape, 64) or not _numbers(offsets, 2) or len(offsets) != 2:
        raise bad("has an invalid shape or invalid offsets")
    start, stop = offsets
    if stop - start != math.prod(shape) * SIZES[dtype]:
        raise bad(f"of {dtype} {shape} has offsets {offsets}, which are {stop - start} bytes")
    return TensorEntry(name, dtype, tuple(shape), data_start + start)


def _numbers(value: Any, max_length: int) -> bool:
    is_list = isinstance(value, list) and len(value) <= max_length
    return is_list and all(type(number) is int and 0 <= number < 1 << 62 for number in value)


def _check_cover(entries: dict[str, TensorEntry], data_start: int, size: int, where: str) -> None:
    """The tensors follow each other without gaps or overlaps, from `data_start` to the end of the file."""
    at = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != at:
            what = "overlaps another" if entry.start < at else "does not begin where the one before ends"
            raise CheckpointError(Problem("bad-header", f"tensor {entry.name[:120]!r} {what}", where))
        at += entry.num_bytes
    if at != size:
        slug = "truncated-file" if size < at else "bad-header"
        what = f"has {size} bytes, and its header describes {at}"
        raise CheckpointError(
            Problem(slug, what, where, fix="the file is damaged or truncated: copy or download it again")
        )


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Header:
    """The header of a file with these tensors (name -> dtype, shape), in this order."""
    described: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at, entries = 0, []
    for name, (dtype, shape) in tensors.items():
        entry = TensorEntry(name, dtype, tuple(shape), at)
        entries.append(entry)
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + entry.num_bytes]}
        at += entry.num_bytes
    text = write_json(described)
    text += b" " * (-len(text) % 8)  # the first tensor begins at a multiple of 8
    raw = len(text).to_bytes(8, "little") + text
    shifted = {e.name: TensorEntry(e.name, e.dtype, e.shape, len(raw) + e.start) for e in entries}
    return Header(shifted, dict(metadata), raw)


# -- dtypes ----------------------------------------------------------------------------------------------------------
# The dtypes of safetensors files, and their names in PyTorch. Does not import torch.


SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}
"""Bytes per element."""

TORCH = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}

CODES = {name: code for code, name in TORCH.items()}
FLOATS = ("F64", "F32", "F16", "BF16")


def is_lossy(source: str, target: str) -> bool:
    """Whether the conversion from one dtype to the other can change a value."""
    return source != target and target not in _EXACT_TARGETS.get(source, ())


_EXACT_TARGETS = {
    "F32": ("F64",),
    "F16": ("F32", "F64"),
    "BF16": ("F32", "F64"),
    "F8_E4M3": ("BF16", "F16", "F32", "F64"),
    "F8_E5M2": ("BF16", "F16", "F32", "F64"),
    "I8": ("I16", "I32", "I64"),
    "I16": ("I32", "I64"),
    "I32": ("I64",),
    "U8": ("U16", "U32", "U64", "I16", "I32", "I64"),
}
"""Dtype -> the wider dtypes that represent all its values exactly."""
