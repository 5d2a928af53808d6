"""From Hugging Face's layout to a training checkpoint, one tensor at a time, without a process group.

`hub/names.py` maps the tensors of one layout to boxes of the other. It needs the class of the model, which is built on
the meta device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.base.boxes import Box, Part, full_part, slices_of
from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.mesh import MeshSpec
from parallelize.checkpoint.format.device_pieces import torch_dtype
from parallelize.checkpoint.format.manifest import Manifest, SavedTensor
from parallelize.checkpoint.hub.config_json import generation_config_text
from parallelize.checkpoint.hub.folder import HubFolder
from parallelize.checkpoint.hub.names import ComputedTensor, ModelTensor, TensorSources, find_sources, source_names
from parallelize.checkpoint.hub.pretrained import model_tensors
from parallelize.checkpoint.run.local_tensors import ModelOnMesh
from parallelize.checkpoint.run.metadata import run_metadata
from parallelize.checkpoint.run.rank_sync import RankSync
from parallelize.checkpoint.tools.model_class import model_on_meta
from parallelize.checkpoint.tools.reshape import (
    ByteCallback,
    NewTensor,
    assembled,
    check_target,
    spec_of,
    target_shardings,
    write_run,
)

T = torch.Tensor


def from_hub(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    mesh: MeshSpec | str | None = None,
    step: int = 0,
    progress: ByteCallback = None,
) -> Path:
    """Write a training checkpoint that has only weights, from a Hugging Face folder. Memory: about one tensor.

    If config.json names a class of `transformers`, the tensors have its names; otherwise those of the files. The
    checkpoint can be loaded by `load_checkpoint`, and by `Checkpointer.resume(strict=False)` with a fresh optimizer.

    Args:
        source: a folder in Hugging Face's layout.
        target: folder of a run, new or without this step.
        mesh: such as `pp=2,dp=4,tp=2`. Default: one rank.
        step: the step of the new checkpoint.
        progress: called with the number of bytes after each write.

    Returns: the published folder in `target`.
    Raises: CheckpointError: of `HubFolder` and `find_sources`, `twins-differ`, `bad-step`, `bad-target`,
        `already-saved`, `folder-in-use`, `write-failed`, `no-transformers`, `unbuildable-model`; MeshError. Nothing is
        left then.
    """
    if type(step) is not int or step < 0:
        raise CheckpointError(Problem("bad-step", f"{step!r} is not a step", fix="use an integer, 0 or more"))
    spec = spec_of(mesh) if mesh is not None else MeshSpec()
    check_target(Path(target), Path(source))
    with HubFolder(source) as hub:
        module = model_on_meta(next(iter(hub.config.get("architectures") or ()), None), hub.config)
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
    about["model"]["generation_config"] = generation_config_text(hub.folder) if hub.config else None
    state: dict[str, Any] = {
        "optimizers": {},
        "generators": {},
        "streams": None,
        "schedulers": {},
        "data": None,
        "values": None,
    }
    return Manifest(step, about, {}, {}, state)
