"""Conversion between training checkpoints and Hugging Face's layout, one tensor at a time, without a process group.

`hub/names.py` maps the tensors of one layout to boxes of the other. It needs the class of the model, which is built on the
meta device.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.checkpoint.format import disk, folders
from parallelize.checkpoint.format.boxes import (
    Box,
    Part,
    full_box,
    full_part,
    intersection,
    relative_to,
    shape_of,
    slices_of,
    starts,
)
from parallelize.checkpoint.format.dtypes import CODES, FLOATS, TORCH
from parallelize.checkpoint.format.host_memory import empty, torch_dtype
from parallelize.checkpoint.format.manifest import Manifest, SavedTensor, read_manifest
from parallelize.checkpoint.format.writer import TensorToWrite, write_tensors
from parallelize.checkpoint.hub.extras import carry_files, write_extras
from parallelize.checkpoint.hub.file_shards import INDEX, HubTensor, assign_files, index_of, parse_size
from parallelize.checkpoint.hub.folder import HubFolder
from parallelize.checkpoint.hub.names import (
    ComputedTensor,
    ModelTensor,
    TensorSources,
    find_sources,
    parts_to_save,
    source_names,
)
from parallelize.checkpoint.hub.pretrained import in_source_order, model_tensors
from parallelize.checkpoint.run.fill_tensors import Files, read_box
from parallelize.checkpoint.run.local_tensors import ModelOnMesh
from parallelize.checkpoint.run.metadata import run_metadata
from parallelize.checkpoint.run.rank_sync import RankSync
from parallelize.checkpoint.tools.reshape import (
    ByteCallback,
    NewTensor,
    check_target,
    spec_of,
    target_shardings,
    write_run,
)
from parallelize.errors import CheckpointError, Problem, did_you_mean, short_list
from parallelize.mesh import MeshSpec

T = torch.Tensor
ReadBox = Callable[[str, Box, T], None]
"""(name of a tensor, box, view to fill)"""
_IMPLEMENTATION_KEYS = (
    "_attn_implementation",
    "attn_implementation",
    "_experts_implementation",
    "experts_implementation",
)


# -- model class ---------------------------------------------------------------------------------------------------------


def build_on_meta(name: str | None, config: Mapping[str, Any] | None, required: bool = False) -> Any:
    """Build a model of `transformers` on the meta device. Only public classes of `transformers`; nothing is downloaded.

    Args:
        name: the name of the class.
        config: the values of config.json.
        required: a class that does not exist is an error.

    Returns: the model. None without a name or config; or, if not `required`, if there is no such class.
    Raises: CheckpointError `no-transformers`, `unbuildable-model`.
    """
    if not name or not config:
        return None
    try:
        import transformers
    except ImportError:
        what = f"{name} is a model of transformers, which is needed for the names of its tensors in files"
        raise CheckpointError(Problem("no-transformers", what, fix="pip install transformers")) from None
    model_class: Any = getattr(transformers, name, None)
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if not is_model:  # a name of its own, so that type checkers without transformers keep `Any`
        if required:
            what = f"transformers {transformers.__version__} has no model {name}"
            raise CheckpointError(
                Problem("unbuildable-model", what, fix="use the version that the model was trained with")
            )
        return None
    config = {key: value for key, value in config.items() if key not in _IMPLEMENTATION_KEYS}
    try:
        config_class: Any = model_class.config_class
        original = config_class.from_dict(deepcopy(config))
        eager = deepcopy(original)
        eager._attn_implementation = "eager"  # the implementation used in training may not be installed here
        with torch.device("meta"):
            module = model_class(eager)
    except Exception as error:
        rows = (("why", (str(error).partition("\n")[0] or type(error).__name__)[:200]),)
        what = f"transformers cannot build a {name} from its config"
        fix = "use the version of transformers that it was saved with"
        raise CheckpointError(Problem("unbuildable-model", what, rows=rows, fix=fix)) from error
    module.config = original
    return module


def _class_name(described: Mapping[str, Any]) -> str | None:
    """The name of the class, from `about["model"]`; None if it is not of `transformers`."""
    module, _, name = str(described.get("class") or "").rpartition(".")
    return name if module.partition(".")[0] == "transformers" else None


# -- reading -------------------------------------------------------------------------------------------------------------


def assembled(box: Box, dtype: torch.dtype, parts: Sequence[Part], read: ReadBox) -> T:
    """The values of a box of a tensor, read from the sources of its parts."""
    out = empty(shape_of(box), dtype)
    for part in parts:
        shared = intersection(box, part.target)
        if shared is not None:
            view = out[slices_of(relative_to(shared, starts(box)))]
            read(part.source, part.source_box(shared), in_source_order(view, part))
    return out


# -- to Hugging Face ------------------------------------------------------------------------------------------------------


def to_hub(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    carry: str | os.PathLike | None = None,
    step: int | None = None,
    progress: ByteCallback = None,
) -> Path:
    """Write the weights of a training checkpoint as `save_pretrained` of `transformers` would. Memory: about one tensor.

    Names, ties and conversions are those of the class of the model, if it is of `transformers`. Otherwise tensors are
    written under their names in the model.

    Args:
        source: folder of one step, or of a run.
        target: folder to write; new or empty.
        dtype: the dtype of floating-point weights. Default: the compute dtype, or the saved dtype where that is
            unknown.
        max_shard_size: maximum size of a file: bytes, or a text such as "5GB".
        carry: a folder whose files that are not weights (tokenizer, chat template) are copied.
        step: which step of a run. Default: the newest.
        progress: called with the number of bytes after each write.

    Returns: the folder. It is renamed into place after everything was written.
    Raises: CheckpointError: problems of the source, `folder-not-empty`, `bad-dtype`, `bad-size`, `bad-target`,
        `no-transformers`, `unbuildable-model`, `other-model`, `unwritable-conversion`, `unwritable-config`, `write-failed`.
        Nothing is left then.
    """
    folder = folders.resolve(source, step)
    check_target(Path(target), folder)
    manifest = read_manifest(folder)
    described = manifest.about.get("model") or {}
    config = json.loads(described["config"]) if described.get("config") else None
    module = build_on_meta(_class_name(described), config, required=True)
    tensors = _tensors_out(module, manifest, _dtype_code(dtype))
    shards = assign_files({name: tensor.num_bytes for name, tensor in tensors.items()}, parse_size(max_shard_size))
    with Files(folder, manifest) as files, _new_folder(Path(target)) as writing:

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


# -- from Hugging Face ----------------------------------------------------------------------------------------------------


def from_hub(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    mesh: MeshSpec | str | None = None,
    step: int = 0,
    progress: ByteCallback = None,
) -> Path:
    """Write a training checkpoint that has only weights, from a Hugging Face folder. Memory: about one tensor.

    If config.json names a class of `transformers`, the tensors have its names; otherwise those of the files. The checkpoint
    can be loaded by `load_checkpoint`, and by `Checkpointer.resume(strict=False)` with a fresh optimizer.

    Args:
        source: a folder in Hugging Face's layout.
        target: folder of a run, new or without this step.
        mesh: such as `pp=2,dp=4,tp=2`. Default: one rank.
        step: the step of the new checkpoint.
        progress: called with the number of bytes after each write.

    Returns: the published folder in `target`.
    Raises: CheckpointError: of `HubFolder` and `find_sources`, `twins-differ`, `bad-step`, `bad-target`, `already-saved`,
        `folder-in-use`, `write-failed`, `no-transformers`, `unbuildable-model`; MeshError. Nothing is left then.
    """
    if type(step) is not int or step < 0:
        raise CheckpointError(Problem("bad-step", f"{step!r} is not a step", fix="use an integer, 0 or more"))
    spec = spec_of(mesh) if mesh is not None else MeshSpec()
    check_target(Path(target), Path(source))
    with HubFolder(source) as hub:
        module = build_on_meta(next(iter(hub.config.get("architectures") or ()), None), hub.config)
        tensors = _tensors_in(module, hub)
        blank = _blank(module, hub, spec, step)
        manifest = replace(blank, tensors={saved.name: saved for saved, _ in tensors})
        shardings = target_shardings(manifest, spec, 0)
        new_tensors = [NewTensor(saved, shardings[saved.name], read) for saved, read in tensors]
        return write_run(Path(target), blank, spec, new_tensors, progress)


def _tensors_in(module: Any, hub: HubFolder) -> list[tuple[SavedTensor, Callable[[Box], T]]]:
    """Every tensor of the new checkpoint, with the function that reads a box of it."""
    if module is None:
        model = [ModelTensor(name, (name,), shape, False) for name, (_, shape) in hub.tensors.items()]
        sources = TensorSources({tensor.name: (full_part(tensor.name, tensor.shape),) for tensor in model})
    else:
        model = model_tensors(ModelOnMesh(module), RankSync())
        sources = find_sources(module, model, hub.tensors)
    _check_twins(hub, sources)
    tensors = []
    for tensor in model:
        source = sources.by_name.get(tensor.name)
        if source is None:
            continue
        code = hub.tensors[source_names(source)[0]][0]
        about: dict[str, Any] = {"names": list(tensor.names)} if len(tensor.names) > 1 else {}
        saved = SavedTensor(f"model/{tensor.name}", code, tensor.shape, (), about)
        tensors.append((saved, _reader(hub, source, code)))
    return tensors


def _reader(hub: HubFolder, source: ComputedTensor | tuple[Part, ...], code: str) -> Callable[[Box], T]:
    if not isinstance(source, ComputedTensor):
        return partial(_read_parts, hub, source, torch_dtype(code))
    return partial(_read_computed, hub, source, torch_dtype(code))


def _read_parts(hub: HubFolder, parts: tuple[Part, ...], dtype: torch.dtype, box: Box) -> T:
    return assembled(box, dtype, parts, hub.read)


def _read_computed(hub: HubFolder, source: ComputedTensor, dtype: torch.dtype, box: Box) -> T:
    return source.compute({name: hub.read_full(name) for name in source.sources})[slices_of(box)].to(dtype)


def _check_twins(hub: HubFolder, sources: TensorSources) -> None:
    """Two tensors for one tied parameter must be equal. Raises: CheckpointError `twins-differ`."""
    for used, ignored in sources.twins:
        values = hub.read_full(used)
        if not torch.equal(values, hub.read_full(ignored).to(values.dtype)):
            what = f"has two different tensors for one tied parameter: {used} and {ignored}"
            fix = "set tie_word_embeddings=False in its config.json, or remove one of them"
            raise CheckpointError(Problem("twins-differ", what, str(hub.folder), fix=fix))


def _blank(module: nn.Module | None, hub: HubFolder, mesh: MeshSpec, step: int) -> Manifest:
    """The new manifest, without files and tensors."""
    about = run_metadata(ModelOnMesh(module if module is not None else nn.Module()))
    about |= {"mesh": [list(axis) for axis in mesh.axes], "world_size": mesh.world_size}
    about["converted_from"] = str(hub.folder)
    if module is None:
        about["model"] = {"class": None, "config": json.dumps(hub.config) if hub.config else None}
    path = hub.folder / "generation_config.json"
    about["model"]["generation_config"] = path.read_text() if hub.config and path.is_file() else None
    state: dict[str, Any] = {
        "optimizers": {},
        "generators": {},
        "streams": None,
        "schedulers": {},
        "data": None,
        "values": None,
    }
    return Manifest(step, about, {}, {}, state)
