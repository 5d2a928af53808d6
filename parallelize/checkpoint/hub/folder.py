"""A folder (or one file) in Hugging Face's layout. Headers and index are checked before any tensor is read.

config.json
model.safetensors, or model.safetensors.index.json with model-00001-of-00003.safetensors, ...
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.shard_data import data_of
from parallelize.base.boxes import Box, full_box, slices_of
from parallelize.base.errors import CheckpointError, Problem, short_list
from parallelize.base.files.paths import open_file
from parallelize.checkpoint.format.device_pieces import Arena, code_of, empty, torch_dtype
from parallelize.checkpoint.format.reader import Buffers, TensorFile
from parallelize.checkpoint.hub.config_json import read_hub_config
from parallelize.checkpoint.hub.file_shards import INDEX, SINGLE, read_index
from parallelize.checkpoint.run.local_tensors import LocalTensor, ModelOnMesh
from parallelize.checkpoint.run.meta_model import move_to_arena, place
from parallelize.plan.model_facts import named_once

T = torch.Tensor
_FIX = "the files do not belong together: copy or download them again"


class HubFolder:
    """The tensors of a checkpoint in Hugging Face's layout. Close it, or use `with`.

    Attributes:
        folder: the folder of the files.
        tensors: name -> (dtype, shape).
        config: the content of config.json; empty without one.
    """

    def __init__(self, path: str | os.PathLike, *, allow_pickle: bool = False):
        """
        Args:
            path: a folder, or one .safetensors file.
            allow_pickle: read `pytorch_model.bin` if there are no safetensors files. Reading a pickle can run code.
                PyTorch's restricted reader (`weights_only=True`) is used, which refuses most of it.

        Raises: CheckpointError `no-weights`, `pickle-only`, `quantized`, `bad-index`, `missing-file`, `unsafe-path`,
            and of `TensorFile` and `read_hub_config`.
        """
        path = Path(path)
        self.folder, name = (path.parent, path.name) if path.is_file() else (path, "")
        self._files: dict[str, Any] = {}
        self._buffers = Buffers()
        self._file_of: dict[str, Any] = {}
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.config = _unquantized_config(self.folder) if not name else {}
        try:
            self._open(name, allow_pickle)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str, allow_pickle: bool) -> None:
        if name:
            self._add(name, TensorFile(self.folder, name, None, self._buffers))
        elif os.path.lexists(self.folder / SINGLE):  # preferred to an index, as in transformers
            self._add(SINGLE, TensorFile(self.folder, SINGLE, None, self._buffers))
        elif (self.folder / INDEX).is_file():
            self._open_indexed()
        else:
            self._open_others(allow_pickle)

    def _open_indexed(self) -> None:
        """Open the files of the index, which must list exactly the tensors of the files."""
        where = str(self.folder / INDEX)
        listed = read_index(self.folder)
        for file in sorted(set(listed.values())):
            self._add(file, TensorFile(self.folder, file, None, self._buffers))
        problems = []
        for tensor, file in listed.items():
            if tensor not in self._files[file].header.entries:
                others = [name for name, other in self._files.items() if tensor in other.header.entries]
                what = f"lists {tensor} in {file}, which does not contain it"
                what += f" ({others[0]} does)" if others else ""
                problems.append(Problem("bad-index", what, where, fix=_FIX))
        unlisted = [name for name in self.tensors if name not in listed]
        if unlisted:
            what = f"does not list {short_list(unlisted, 4)}, which {self._file_of[unlisted[0]].path.name} contains"
            problems.append(Problem("bad-index", what, where, fix=_FIX))
        if problems:
            raise CheckpointError(*problems[:20])

    def _open_others(self, allow_pickle: bool) -> None:
        """Without an index: all safetensors files, or else the pickles."""
        existing = sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
        names = fnmatch.filter(existing, "*.safetensors")
        for name in names:
            self._add(name, TensorFile(self.folder, name, None, self._buffers))
        if names:
            return
        pickles = fnmatch.filter(existing, "pytorch_model*.bin")
        if not pickles:
            contents = short_list(existing) if self.folder.is_dir() else "the folder does not exist"
            what = f"has neither {SINGLE} nor {INDEX}; existing files: {contents}"
            raise CheckpointError(Problem("no-weights", what, str(self.folder)))
        if not allow_pickle:
            what = f"has {pickles[0]} and no safetensors files; reading a pickle can run code"
            fix = "convert it, or pass allow_pickle=True if you trust its source"
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

    def position(self, name: str) -> tuple[str, int]:
        """(file, first byte) of a tensor. Reading tensors in this order reads the files sequentially."""
        file = self._file_of[name]
        return file.path.name, file.header.entries[name].start

    def read(self, name: str, box: Box, out: T, wait: bool = True) -> None:
        """Copy a box of a tensor into `out`; with `wait=False`, before `finish` returns.

        Raises: CheckpointError of `TensorFile.read`.
        """
        self._file_of[name].read(name, box, out, wait=wait)

    def finish(self) -> None:
        """Complete reads that were not waited for. Raises: CheckpointError of `TensorFile.read`."""
        self._buffers.finish()

    def mapped(self, name: str, box: Box) -> T | None:
        """A box of a tensor as a view of the file, or None where it must be read. See `TensorFile.mapped`."""
        file = self._file_of[name]
        return file.mapped(name, box) if isinstance(file, TensorFile) else None

    def read_full(self, name: str) -> T:
        """A full tensor, on the CPU. Raises: CheckpointError of `TensorFile.read`."""
        code, shape = self.tensors[name]
        full = empty(shape, torch_dtype(code))
        self.read(name, full_box(shape), full)
        return full

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far."""
        return sum(file.bytes_read for file in self._files.values())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> HubFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unquantized_config(folder: Path) -> dict[str, Any]:
    """Raises: CheckpointError of `read_hub_config`, `quantized`."""
    config = read_hub_config(folder)
    if config.get("quantization_config"):
        fix = (
            "weights that are not quantized, which quantize(model, 'nf4') before loading lets be quantized while they "
            "are read"
        )
        raise CheckpointError(Problem("quantized", "the weights are quantized", str(folder), fix=fix))
    return config


class PickledFile:
    """A `pytorch_model.bin`, mapped into memory, with the interface of `TensorFile` that `HubFolder` uses."""

    def __init__(self, folder: Path, name: str):
        self.path, self.bytes_read = folder / name, 0
        os.close(open_file(folder, name)[0])  # checks that it is a regular file of this folder
        try:
            content = torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            what = f"cannot be read: {type(error).__name__} {str(error)[:200]}"
            raise CheckpointError(Problem("unreadable-file", what, str(self.path))) from error
        if not isinstance(content, dict):
            what = f"contains a {type(content).__name__}, and not tensors by name"
            raise CheckpointError(Problem("unreadable-file", what, str(self.path)))
        self.values = {name: value for name, value in content.items() if isinstance(value, T)}
        self.header = _PickledHeader(
            {name: _PickledEntry(name, code_of(v.dtype) or "", tuple(v.shape)) for name, v in self.values.items()}
        )

    def read(self, name: str, box: Box, out: T, wait: bool = True) -> None:
        part = self.values[name][slices_of(box)]
        out.copy_(part)
        self.bytes_read += part.numel() * part.element_size()

    def close(self) -> None:
        self.values = {}


class _PickledEntry:
    def __init__(self, name: str, dtype: str, shape: tuple[int, ...]):
        self.name, self.dtype, self.shape, self.start = name, dtype, shape, 0


class _PickledHeader:
    def __init__(self, entries: dict[str, _PickledEntry]):
        self.entries = entries


# -- mapped weights --------------------------------------------------------------------------------------------------
# Weights that stay in their file: parameters as views of a private map, where a shard is one run of bytes in the
# model's dtype.


class FolderRead(Protocol):
    """One read: a box of a tensor of the folder, and the view that it fills."""

    @property
    def source(self) -> str: ...
    @property
    def box(self) -> Box: ...
    @property
    def out(self) -> T: ...


def check_mappable(module: nn.Module, device: Any, was_meta: bool) -> None:
    """Raises: CheckpointError `not-mappable` for a model with values, on another device than the CPU, or under ZeRO."""
    reason = ""
    if not was_meta:
        reason = "the model has values, which are changed in place after everything was read"
    elif torch.device(device).type != "cpu":
        reason = f"the model is allocated on {torch.device(device)}"
    elif data_of(module) is not None or any(isinstance(part, FSDPModule) for part in module.modules()):
        reason = "ZeRO stores parameters in buffers of its own"
    if reason:
        fix = "build the model on the meta device, for the CPU, without ZeRO; or leave mapped out"
        raise CheckpointError(Problem("not-mappable", f"load_pretrained(mapped=True): {reason}", fix=fix))


def map_parameters(
    on_mesh: ModelOnMesh,
    hub: HubFolder,
    tensors: Sequence[tuple[str, LocalTensor]],
    loaded: Container[str],
    reads_of: Callable[[LocalTensor], Iterable[FolderRead]],
) -> tuple[set[str], list[LocalTensor]]:
    """Make parameters that were allocated, and not written to, views of the files; move all others to huge pages.

    Args:
        tensors: (name in the model, its local tensor) of all parameters and buffers. loaded: the names that the folder
            has.
        reads_of: what would fill a local tensor.

    Returns: the names of the parameters that are views, and every local tensor with its new memory.
    """
    memory: dict[str, T] = {}
    views, arena, by_name = set(), Arena(), {name: tensor for name, tensor in tensors if name in loaded}
    for names, parameter in named_once(on_mesh.module):
        name = on_mesh.canonical(names[0])
        view = (
            _view_of_file(hub, by_name[name].stored.local, list(reads_of(by_name[name]))) if name in by_name else None
        )
        if view is None:
            move_to_arena(parameter, arena)
        else:
            place(parameter, view)
            views.add(name)
        memory[name] = to_local(parameter)
    return views, [
        replace(tensor, stored=replace(tensor.stored, local=memory[name])) if name in memory else tensor
        for name, tensor in tensors
    ]


def _view_of_file(hub: HubFolder, local: T, reads: list[FolderRead]) -> T | None:
    """What a local tensor can be instead of being read, or None."""
    if len(reads) != 1 or torch_dtype(hub.tensors[reads[0].source][0]) != local.dtype or not local.is_contiguous():
        return None
    out = reads[0].out
    fills_it = out.numel() == local.numel() and out.data_ptr() == local.data_ptr() and out.stride() == local.stride()
    return hub.mapped(reads[0].source, reads[0].box) if fills_it and out.shape == local.shape else None
