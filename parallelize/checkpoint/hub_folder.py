"""A folder (or one file) in Hugging Face's layout: which file holds which tensor, checked before anything is read.

config.json   model.safetensors   or   model.safetensors.index.json with model-00001-of-00003.safetensors, ...
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from parallelize.checkpoint.boxes import Box, slices_of
from parallelize.checkpoint.hub_shards import INDEX, SINGLE
from parallelize.checkpoint.memory import code_of
from parallelize.checkpoint.paths import check_name, open_file, read_small
from parallelize.checkpoint.reader import Buffers, TensorFile
from parallelize.checkpoint.strict_json import read_json
from parallelize.errors import CheckpointError, Problem, short_list

T = torch.Tensor


class HubFolder:
    """The tensors of a checkpoint. Close it, or use `with`.

    Attributes:
        tensors: name -> (dtype, shape). config: of config.json, empty where there is none.
    """

    def __init__(self, path: str | os.PathLike, *, allow_pickle: bool = False):
        """
        Args:
            path: a folder, or one .safetensors file.
            allow_pickle: read `pytorch_model.bin` where there are no safetensors files. A pickle can run code as it is read;
                PyTorch's restricted reader is used, which refuses most of that.

        Raises: CheckpointError `no-weights`, `pickle-only`, `quantized`, `bad-index`, `missing-file`, `unsafe-path`, and of
            `TensorFile`.
        """
        given = Path(path)
        self.folder, name = (given.parent, given.name) if given.is_file() else (given, "")
        self._files: dict[str, Any] = {}
        self._buffers = Buffers()
        self._file_of: dict[str, Any] = {}
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.config = self._config() if not name else {}
        try:
            self._open(name, allow_pickle)
        except BaseException:
            self.close()
            raise

    def _config(self) -> dict[str, Any]:
        if not (self.folder / "config.json").is_file():
            return {}
        config = read_json(
            read_small(self.folder, "config.json", 16 << 20), str(self.folder / "config.json"), finite=False
        )
        if not isinstance(config, dict):
            raise CheckpointError(Problem("bad-json", "is no JSON object", str(self.folder / "config.json")))
        if config.get("quantization_config"):
            fix = "load it with transformers, or use weights that are not quantized"
            raise CheckpointError(Problem("quantized", "the weights are quantized", str(self.folder), fix=fix))
        return config

    def _open(self, name: str, allow_pickle: bool) -> None:
        if name:
            self._add(name, TensorFile(self.folder, name, None, self._buffers))
        elif os.path.lexists(self.folder / SINGLE):  # before an index, as transformers has it
            self._add(SINGLE, TensorFile(self.folder, SINGLE, None, self._buffers))
        elif (self.folder / INDEX).is_file():
            self._open_indexed()
        else:
            self._open_others(allow_pickle)

    def _open_indexed(self) -> None:
        """Index and files must say the same: what one lacks has been lost."""
        where = str(self.folder / INDEX)
        index = read_json(read_small(self.folder, INDEX), where)
        listed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(listed, dict) or not listed:
            raise CheckpointError(Problem("bad-index", "has no weight_map of names to files", where))
        names = {check_name(file, where) for file in listed.values()}
        for file in sorted(names):
            self._add(file, TensorFile(self.folder, file, None, self._buffers))
        problems = []
        for tensor, file in listed.items():
            if tensor not in self._files[file].header.entries:
                there = [n for n, one in self._files.items() if tensor in one.header.entries]
                what = f"{tensor} is to be in {file}, which does not hold it"
                what += f" ({there[0]} does)" if there else ""
                problems.append(
                    Problem("bad-index", what, where, fix="the files do not belong together: get them anew")
                )
        unlisted = [name for name in self.tensors if name not in listed]
        if unlisted:
            what = f"does not list {short_list(unlisted, 4)}, which {self._file_of[unlisted[0]].path.name} holds"
            problems.append(Problem("bad-index", what, where, fix="the files do not belong together: get them anew"))
        if problems:
            raise CheckpointError(*problems[:20])

    def _open_others(self, allow_pickle: bool) -> None:
        names = sorted(path.name for path in self.folder.glob("*.safetensors")) if self.folder.is_dir() else []
        for name in names:
            self._add(name, TensorFile(self.folder, name, None, self._buffers))
        if names:
            return
        pickles = sorted(path.name for path in self.folder.glob("pytorch_model*.bin")) if self.folder.is_dir() else []
        if not pickles:
            there = (
                short_list(sorted(path.name for path in self.folder.iterdir())) if self.folder.is_dir() else "no folder"
            )
            what = f"no {SINGLE}, no {INDEX}; there: {there}"
            raise CheckpointError(Problem("no-weights", what, str(self.folder)))
        if not allow_pickle:
            what = f"has {pickles[0]} and no safetensors files; a pickle can run code as it is read"
            fix = "convert it, or pass allow_pickle=True if you trust where it came from"
            raise CheckpointError(Problem("pickle-only", what, str(self.folder), fix=fix))
        for name in pickles:
            self._add(name, PickledFile(self.folder, name))

    def _add(self, name: str, file: Any) -> None:
        self._files[name] = file
        for entry in file.header.entries.values():
            if entry.name in self.tensors:
                what = f"{entry.name} is in {self._file_of[entry.name].path.name} and in {name}"
                raise CheckpointError(Problem("bad-index", what, str(self.folder), fix="keep one of the files"))
            self.tensors[entry.name] = (entry.dtype, entry.shape)
            self._file_of[entry.name] = file

    def place(self, name: str) -> tuple[str, int]:
        """(file, first byte) of a tensor: reading in this order goes through the files from begin to end."""
        file = self._file_of[name]
        return file.path.name, file.header.entries[name].start

    def read(self, name: str, box: Box, out: T) -> None:
        """A box of a tensor into `out`. Raises: CheckpointError of `TensorFile.read`."""
        self._file_of[name].read(name, box, out)

    @property
    def bytes_read(self) -> int:
        """Of tensors, so far."""
        return sum(file.bytes_read for file in self._files.values())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> HubFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PickledFile:
    """A `pytorch_model.bin`, mapped into memory, with the words of a `TensorFile`."""

    def __init__(self, folder: Path, name: str):
        self.path, self.bytes_read = folder / name, 0
        os.close(open_file(folder, name)[0])  # a regular file of this folder
        try:
            held = torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            what = f"cannot be read: {type(error).__name__} {str(error)[:200]}"
            raise CheckpointError(Problem("unreadable-file", what, str(self.path))) from error
        if not isinstance(held, dict):
            what = f"holds a {type(held).__name__}, and not tensors by name"
            raise CheckpointError(Problem("unreadable-file", what, str(self.path)))
        self.held = {name: value for name, value in held.items() if isinstance(value, T)}
        self.header = _Held(
            {name: _Entry(name, code_of(v.dtype) or "", tuple(v.shape)) for name, v in self.held.items()}
        )

    def read(self, name: str, box: Box, out: T) -> None:
        part = self.held[name][slices_of(box)]
        out.copy_(part)
        self.bytes_read += part.numel() * part.element_size()

    def close(self) -> None:
        self.held = {}


class _Entry:
    def __init__(self, name: str, dtype: str, shape: tuple[int, ...]):
        self.name, self.dtype, self.shape, self.start = name, dtype, shape, 0


class _Held:
    def __init__(self, entries: dict[str, _Entry]):
        self.entries = entries
