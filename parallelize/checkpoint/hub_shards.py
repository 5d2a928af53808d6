"""Which file of a Hugging Face folder holds which tensor, as `transformers` would share them out. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from parallelize.checkpoint.boxes import Part, volume, whole
from parallelize.checkpoint.dtypes import SIZES
from parallelize.errors import CheckpointError, Problem

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True)
class Written:
    """A tensor of a folder that is written: its dtype, shape, and where its elements stand in the model's tensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return volume(whole(self.shape)) * SIZES[self.dtype]


def parse_size(size: int | str) -> int:
    """Bytes of "5GB", "200MB", "1GiB", or a number. Raises: CheckpointError `bad-size`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(size).upper())
    if found is None or found.group(2) not in (*_UNITS, "B") or float(found.group(1)) <= 0:
        raise CheckpointError(Problem("bad-size", f"{size!r} is no size of a file", fix='"5GB", or a number of bytes'))
    return int(float(found.group(1)) * _UNITS.get(found.group(2), 1))


def share_out(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """File name -> tensors, in the order given: a file is full when the next tensor would exceed `most` bytes; a tensor that
    exceeds it alone gets a file of its own."""
    files: list[list[str]] = []
    current: list[str] = []
    held = 0
    for name, size in sizes.items():
        if size > most:
            files.append([name])
            continue
        if held + size > most:
            files.append(current)
            current, held = [], 0
        current.append(name)
        held += size
    if current:
        files.append(current)
    if len(files) <= 1:
        return {SINGLE: files[0] if files else []}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": names for n, names in enumerate(files, 1)}


def index_of(files: Mapping[str, list[str]], sizes: Mapping[str, int], num_parameters: int) -> bytes:
    """The text of `model.safetensors.index.json`."""
    where = {name: file for file, names in files.items() for name in names}
    metadata = {"total_parameters": num_parameters, "total_size": sum(sizes.values())}
    index = {"metadata": metadata, "weight_map": where}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
