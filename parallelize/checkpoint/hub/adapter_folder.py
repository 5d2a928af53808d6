"""Adapters of a planned model as PEFT's folders: adapter_config.json and adapter_model.safetensors, written by PEFT itself.

Full tensors of the adapters alone are gathered on the first rank. PEFT loads such a folder on any mesh or none, and what it has written
itself loads here: `PeftModel.from_pretrained(model, folder)`, `model.load_adapter(folder, name)`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.applied.records import mesh_of
from parallelize.checkpoint.run.local_tensors import ModelOnMesh, model_on_mesh
from parallelize.checkpoint.run.rank_sync import TIMEOUT_S, RankSync, as_parallelize_error
from parallelize.checkpoint.run.snapshot import reshard_units
from parallelize.errors import CheckpointError, ParallelizeError, Problem
from parallelize.plan.adapters import BASE, is_adapter_parameter

T = torch.Tensor


def save_adapter(model: Any, folder: str | os.PathLike, *, timeout_s: float = TIMEOUT_S) -> Path:
    """Write the adapters of a model as `save_pretrained` of PEFT does. A collective over all processes.

    Args:
        model: a `PeftModel` that is planned, or that contains a planned model; or a `ParallelModel` of one.
        folder: the folder to write, which must be new or empty.
        timeout_s: seconds to wait for other ranks.

    Returns: the folder. It is renamed into place after everything was written.
    Raises: CheckpointError `no-adapters`, `folder-not-empty`, `unsavable-adapter`, `write-failed`, on every rank.
    Cost: one all-gather of each adapter tensor over the axes that shard it; the stages of a pipeline send theirs to the first rank.
    """
    root = model if isinstance(model, nn.Module) else model.module
    if not hasattr(root, "peft_config"):
        what = f"{type(root).__name__} has no adapters of PEFT"
        raise CheckpointError(Problem("no-adapters", what, fix="save_pretrained writes the weights of a model"))
    planned = next((inner for inner in root.modules() if mesh_of(inner) is not None), root)
    _, on_mesh = model_on_mesh(planned)
    sync = RankSync(on_mesh.mesh, timeout_s, own_group=False)
    try:
        reshard_units(planned)
        return _write(root, on_mesh, sync, Path(folder).resolve())
    finally:
        sync.close()


def _write(root: Any, on_mesh: ModelOnMesh, sync: RankSync, folder: Path) -> Path:
    error: ParallelizeError | None = None
    if sync.is_coordinator and folder.exists() and any(folder.iterdir()):
        error = CheckpointError(Problem("folder-not-empty", f"{folder} has files already", fix="choose a new folder"))
    sync.agree(error)
    state = _gathered(root, on_mesh, sync)
    if sync.is_coordinator:
        temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
        try:
            root.save_pretrained(temporary, state_dict=state)
            _check(root, temporary, state)
            if folder.exists():
                folder.rmdir()
            os.replace(temporary, folder)
        except Exception as failure:
            shutil.rmtree(temporary, ignore_errors=True)
            error = as_parallelize_error(failure)
    sync.agree(error)
    return folder


def _gathered(root: nn.Module, on_mesh: ModelOnMesh, sync: RankSync) -> dict[str, T]:
    """The full tensors of all adapters, on the CPU of the first rank; empty on the others."""
    is_first, embeddings = on_mesh.is_first, {*_adapted_embeddings(root)}
    state: dict[str, T] = {}
    for name, parameter in root.named_parameters():
        if is_adapter_parameter(name) or id(parameter) in embeddings:
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if is_first:
                state[name] = full.detach().cpu()
    if sync.size == 1:
        return state
    parts: list[Any] | None = [None] * sync.size if sync.is_coordinator else None
    dist.gather_object(state, parts, dst=sync.ranks[0], group=sync.group)
    return {name: value for part in parts or () for name, value in part.items()}


def _adapted_embeddings(root: Any) -> Iterator[int]:
    """The ids of the weights of embeddings and heads with adapters, which PEFT saves beside them."""
    for get in ("get_input_embeddings", "get_output_embeddings"):
        layer: Any = getattr(root, get)() if hasattr(root, get) else None
        if hasattr(layer, BASE):
            yield from map(id, layer.parameters())


def _check(root: Any, folder: Path, state: Mapping[str, T]) -> None:
    """PEFT finds what it saves in the modules of this rank, which may be a part of a pipeline."""
    written = 0
    for file in folder.rglob("adapter_model.safetensors"):
        with safe_open(file, "pt") as tensors:
            written += len(list(tensors.keys()))
    if written < len(state):
        what = (
            f"PEFT wrote {written} of {len(state)} tensors: it misses those of modules that other pipeline stages have"
        )
        fix = "a mesh without pp, or adapters without modules_to_save on the last stage"
        raise CheckpointError(Problem("unsavable-adapter", what, fix=fix))
