"""Adapters of a planned model as PEFT's folders: adapter_config.json and adapter_model.safetensors, written by PEFT itself.

Full tensors of the adapters alone are gathered on the first rank. PEFT loads such a folder on any mesh or none, and what it has written
itself loads here: `PeftModel.from_pretrained(model, folder)`, `model.load_adapter(folder, name)`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.errors import CheckpointError, ParallelizeError, Problem
from parallelize.checkpoint.run.local_tensors import ModelOnMesh, model_on_mesh
from parallelize.checkpoint.run.rank_sync import TIMEOUT_S, RankSync, as_parallelize_error
from parallelize.plan.adapters import is_adapter_parameter
from parallelize.state.full_values import reshard_units
from parallelize.state.records import mesh_of

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
    state, expected = _gathered(root, on_mesh, sync)
    if sync.is_coordinator:
        temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
        try:
            root.save_pretrained(temporary, state_dict=state)
            _check(temporary, expected)
            if folder.exists():
                folder.rmdir()
            os.replace(temporary, folder)
        except Exception as failure:
            shutil.rmtree(temporary, ignore_errors=True)
            error = as_parallelize_error(failure)
    sync.agree(error)
    return folder


def _gathered(root: Any, on_mesh: ModelOnMesh, sync: RankSync) -> tuple[dict[str, T], set[str]]:
    """(full tensors on the CPU of the first rank, the names that PEFT gives to what it saves); empty on the others."""
    selected, saved = _selected(root)
    state: dict[str, T] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        if is_adapter_parameter(name) or id(parameter) in selected:
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if on_mesh.is_first:
                state[name] = full.detach().cpu()
    if sync.size == 1:
        return state, saved
    parts: list[Any] | None = [None] * sync.size if sync.is_coordinator else None
    dist.gather_object((state, saved), parts, dst=sync.ranks[0], group=sync.group)
    gathered = parts or []
    return {n: value for part, _ in gathered for n, value in part.items()}, {n for _, names in gathered for n in names}


def _selected(root: Any) -> tuple[set[int], set[str]]:
    """(ids of the parameters that PEFT saves, the names that it gives them). Learned prompts it computes itself."""
    from peft import get_peft_model_state_dict

    parameters = dict(root.named_parameters(remove_duplicate=False))
    ids, names = set(), set()
    for adapter, config in root.peft_config.items():
        if not config.is_prompt_learning:
            saved = get_peft_model_state_dict(root, state_dict=dict(parameters), adapter_name=adapter)
            ids |= {id(value) for value in saved.values()}
            names |= {f"{adapter} {name}" for name in saved}
    return ids, names


def _check(folder: Path, expected: set[str]) -> None:
    """PEFT finds what it saves in the modules of this rank, which may be a part of a pipeline."""
    written = set()
    for file in folder.rglob("adapter_model.safetensors"):
        adapter = "default" if file.parent == folder else file.parent.name
        with safe_open(file, "pt") as tensors:
            written |= {f"{adapter} {name}" for name in tensors.keys()}  # noqa: SIM118, as it is no dictionary
    if missing := sorted(expected - written):
        what = f"PEFT left out {len(missing)} tensors of modules that other pipeline stages have, such as {missing[0]}"
        fix = "a mesh without pp, or adapters without modules_to_save on the last stage"
        raise CheckpointError(Problem("unsavable-adapter", what, fix=fix))
