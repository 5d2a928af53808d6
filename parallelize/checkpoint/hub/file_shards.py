"""Which file of a Hugging Face folder has which tensor, as in `transformers`. Does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from parallelize.base.boxes import Part, full_box, volume
from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.paths import check_name, read_small
from parallelize.base.files.strict_json import read_json
from parallelize.checkpoint.format.header import SIZES

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
class HubTensor:
    """A tensor to write into a Hugging Face folder. `parts`: its elements in the tensors of the model."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return volume(full_box(self.shape)) * SIZES[self.dtype]


def read_index(folder: Path) -> dict[str, str]:
    """Tensor -> its file, as the index of a folder says. Raises: CheckpointError `bad-index`, and of `read_small`,
    `read_json` and `check_name`."""
    where = str(folder / INDEX)
    index = read_json(read_small(folder, INDEX), where)
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(Problem("bad-index", "has no weight_map from tensors to files", where))
    return {tensor: check_name(file, where) for tensor, file in listed.items()}


def parse_size(size: int | str) -> int:
    """Bytes of "5GB", "200MB", "1GiB", or a number. Raises: CheckpointError `bad-size`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(size).upper())
    if match is None or match.group(2) not in (*_UNITS, "B") or float(match.group(1)) <= 0:
        raise CheckpointError(Problem("bad-size", f"{size!r} is not a file size", fix='"5GB", or a number of bytes'))
    return int(float(match.group(1)) * _UNITS.get(match.group(2), 1))


def assign_files(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """File name -> names of tensors. `sizes`: name -> bytes, in the order in which tensors are assigned.

    A new file begins when the next tensor would exceed `max_bytes`. A larger tensor gets its own file.
    """
    files: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, size in sizes.items():
        if size > max_bytes:
            files.append([name])
            continue
        if current_bytes + size > max_bytes:
            files.append(current)
            current, current_bytes = [], 0
        current.append(name)
        current_bytes += size
    if current:
        files.append(current)
    if len(files) <= 1:
        return {SINGLE: files[0] if files else []}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": names for n, names in enumerate(files, 1)}


def index_of(files: Mapping[str, list[str]], tensors: Iterable[HubTensor]) -> bytes:
    """The content of `model.safetensors.index.json`. `files`: file name -> names of tensors."""
    weight_map = {name: file for file, names in files.items() for name in names}
    num_parameters = num_bytes = 0
    for tensor in tensors:
        num_parameters += volume(full_box(tensor.shape))
        num_bytes += tensor.num_bytes
    metadata = {"total_parameters": num_parameters, "total_size": num_bytes}
    index = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
