"""From a training checkpoint to Hugging Face's layout, one tensor at a time, without a process group.

`hub/names.py` maps the tensors of one layout to boxes of the other. It needs the class of the model, which is built on
the meta device.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from parallelize.base.boxes import Box, Part, full_box, full_part
from parallelize.base.errors import CheckpointError, Problem, did_you_mean, short_list
from parallelize.checkpoint.format import disk
from parallelize.checkpoint.format.device_pieces import torch_dtype
from parallelize.checkpoint.format.gather import Source, gather
from parallelize.checkpoint.format.header import CODES, FLOATS, TORCH
from parallelize.checkpoint.format.manifest import Manifest, SavedTensor
from parallelize.checkpoint.format.writer import TensorToWrite, write_tensors
from parallelize.checkpoint.hub.extras import carried_files, carry_files, write_extras
from parallelize.checkpoint.hub.file_shards import INDEX, HubTensor, assign_files, index_of, parse_size
from parallelize.checkpoint.hub.names import ModelTensor, parts_to_save
from parallelize.checkpoint.hub.pretrained import model_tensors
from parallelize.checkpoint.run.fill_tensors import Files, read_box
from parallelize.checkpoint.run.local_tensors import ModelOnMesh
from parallelize.checkpoint.run.rank_sync import RankSync
from parallelize.checkpoint.tools.model_class import class_name, model_on_meta
from parallelize.checkpoint.tools.reshape import ByteCallback, ReadBox, assembled, check_target

T = torch.Tensor


def to_hub(
    source: Source,
    target: str | os.PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    carry: str | os.PathLike | None = None,
    step: int | None = None,
    progress: ByteCallback = None,
) -> Path:
    """Write the weights of a training checkpoint as `save_pretrained` of `transformers` would. Memory: about one
    tensor.

    Names, ties and conversions are those of the class of the model, if it is of `transformers`. Otherwise tensors are
    written under their names in the model.

    Args:
        source: folder of one step, or of a run; or several, the folders of nodes that share none.
        target: folder to write; new or empty.
        dtype: the dtype of floating-point weights. Default: the compute dtype, or the saved dtype where that is
            unknown.
        max_shard_size: maximum size of a file: bytes, or a text such as "5GB".
        carry: a folder whose files that are not weights (tokenizer, chat template) are copied.
        step: which step of a run. Default: the newest.
        progress: called with the number of bytes after each write.

    Returns: the folder. It is renamed into place after everything was written.
    Raises: CheckpointError: problems of the source, `missing-node-files`, `folder-not-empty`, `bad-dtype`, `bad-size`,
        `bad-target`, `no-transformers`, `unbuildable-model`, `other-model`, `unwritable-conversion`,
        `unwritable-config`, `write-failed`. Nothing is left then.
    """
    checkpoint = gather(source, step)
    for folder in checkpoint.folders:
        check_target(Path(target), folder)
    checkpoint.check_files()
    if carry is not None:
        carried_files(Path(carry))  # before anything is written
    manifest = checkpoint.manifest
    described = manifest.about.get("model") or {}
    config = json.loads(described["config"]) if described.get("config") else None
    module = model_on_meta(class_name(described), config, required=True)
    tensors = _tensors_out(module, manifest, _dtype_code(dtype))
    shards = assign_files({name: tensor.num_bytes for name, tensor in tensors.items()}, parse_size(max_shard_size))
    with (
        Files(checkpoint.folders[0], manifest, folder_of=checkpoint.present()) as files,
        _new_folder(Path(target)) as writing,
    ):

        def read(name: str, box: Box, out: T) -> None:
            read_box(files, manifest.tensors[f"model/{name}"], box, out)

        for file, names in shards.items():
            items = [_tensor_to_write(name, tensors[name], read) for name in names]
            write_tensors(writing / file, items, {"format": "pt"}, progress)
        _finish(writing, shards, tensors, module, described, carry)
    return Path(target)


def _dtype_code(dtype: torch.dtype | str | None) -> str | None:
    """The code of a dtype in safetensors files. Raises: CheckpointError `bad-dtype`."""
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and CODES.get(name) not in FLOATS:
        known = [TORCH[code] for code in FLOATS]
        raise CheckpointError(
            Problem("bad-dtype", f"{name!r} is not a dtype for weights", fix=did_you_mean(name, known))
        )
    return CODES[name] if dtype is not None else None


def _tensors_out(module: Any, manifest: Manifest, code: str | None) -> dict[str, HubTensor]:
    """The tensors to write, by name. Raises: CheckpointError `other-model`, `unwritable-conversion`."""
    saved = {n.removeprefix("model/"): tensor for n, tensor in manifest.tensors.items() if n.startswith("model/")}
    parts: dict[str, tuple[tuple[int, ...], tuple[Part, ...]]]
    if module is None:
        parts = {name: (tensor.shape, (full_part(name, tensor.shape),)) for name, tensor in saved.items()}
    else:
        model = model_tensors(ModelOnMesh(module), RankSync())
        _check_same_model(model, saved)
        parts = parts_to_save(module, model)
    tensors = {}
    for name, (shape, sources) in parts.items():
        first = saved[sources[0].source]
        dtype = first.about.get("compute") or first.dtype
        if code is not None and dtype in FLOATS:
            dtype = code
        tensors[name] = HubTensor(name, dtype, shape, sources)
    return tensors


def _check_same_model(model: Sequence[ModelTensor], saved: Mapping[str, SavedTensor]) -> None:
    """Compare the model that class and config build with the saved tensors. Raises: CheckpointError `other-model`."""
    built = {tensor.name: tensor.shape for tensor in model}
    different = [name for name in {**built, **saved} if name not in built or name not in saved]
    different += [name for name, tensor in saved.items() if name in built and built[name] != tensor.shape]
    if different:
        name = different[0]
        rows = (
            ("built", str(list(built[name])) if name in built else "no tensor of that name"),
            ("saved", str(list(saved[name].shape)) if name in saved else "no tensor of that name"),
        )
        what = f"class and config build a model with other tensors than were saved: {short_list(different, 4)}"
        fix = "use the version of transformers that the model was trained with, or save_pretrained in the run"
        raise CheckpointError(Problem("other-model", what, name, rows, fix))


def _tensor_to_write(name: str, tensor: HubTensor, read: ReadBox) -> TensorToWrite:
    box, dtype = full_box(tensor.shape), torch_dtype(tensor.dtype)
    return TensorToWrite(name, tensor.dtype, tensor.shape, lambda: assembled(box, dtype, tensor.parts, read))


def _finish(
    writing: Path,
    shards: Mapping[str, list[str]],
    tensors: Mapping[str, HubTensor],
    module: Any,
    described: Mapping[str, Any],
    carry: str | os.PathLike | None,
) -> None:
    """Write the index, the configs, and the files of `carry`. Raises: CheckpointError `unwritable-config`."""
    dtype = next((TORCH[tensor.dtype] for tensor in tensors.values() if tensor.dtype in FLOATS), None)
    with disk.reporting_errors(writing):
        if len(shards) > 1:
            disk.write_file(writing / INDEX, index_of(shards, tensors.values()))
        if described.get("generation_config") and (module is None or module.can_generate()):
            disk.write_file(writing / "generation_config.json", described["generation_config"].encode())
        if module is None and described.get("config"):
            config = json.loads(described["config"]) | ({"dtype": dtype} if dtype is not None else {})
            disk.write_file(writing / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        if module is None and carry is not None:
            carry_files(Path(carry), writing)
        if module is not None:
            _write_extras(module, writing, dtype, carry)


def _write_extras(module: Any, writing: Path, dtype: str | None, carry: str | os.PathLike | None) -> None:
    module.generation_config = None  # `_finish` copies it: transformers refuses to write some published ones
    try:
        write_extras(module, writing, getattr(torch, dtype) if dtype is not None else None, carry)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # checks of config classes raise any kind of error
        rows = (("why", str(error).strip().partition("\n")[0][:200]),)
        what = "transformers refuses to write the model's config"
        raise CheckpointError(Problem("unwritable-config", what, rows=rows, fix="correct the config")) from error


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `folder` at the end, and is removed after an error.

    Raises: CheckpointError `folder-not-empty`, `write-failed`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fix = "name a new folder"
        raise CheckpointError(Problem("folder-not-empty", "exists already and is not empty", str(folder), fix=fix))
    folder = folder.absolute()
    parent = folder.parent
    writing = parent / f".{folder.name}.writing-{uuid.uuid4().hex[:12]}"
    try:
        with disk.reporting_errors(folder):
            parent.mkdir(parents=True, exist_ok=True)
            disk.make_folder(writing)
        yield writing
        with disk.reporting_errors(folder):
            disk.flush_folder(writing)
            disk.rename(writing, folder)
            disk.flush_folder(parent)
    except BaseException:
        disk.remove_folder(writing)
        raise
