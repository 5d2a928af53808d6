"""What a checkpoint contains, read without a model and without its tensors. Does not import torch.

Two layouts are known: a training checkpoint (with a manifest), and a Hugging Face folder (safetensors files, with or
without an index).
"""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parallelize.base.boxes import full_box, volume
from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.digests import KEY
from parallelize.base.files.paths import open_file
from parallelize.checkpoint.format import folders
from parallelize.checkpoint.format.folders import saving_nodes
from parallelize.checkpoint.format.gather import GatheredCheckpoint, Source, gather, sources_of
from parallelize.checkpoint.format.header import read_header
from parallelize.checkpoint.format.manifest import NAME, SavedTensor
from parallelize.checkpoint.hub.config_json import read_hub_config
from parallelize.checkpoint.hub.file_shards import INDEX, SINGLE, read_index

_STRUCTS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


def is_hub_folder(path: Path) -> bool:
    """Whether a folder has weights in Hugging Face's layout and is not a training checkpoint."""
    if not path.is_dir() or (path / NAME).is_file() or folders.published(path):
        return False
    return any((path / name).is_file() for name in (INDEX, SINGLE, "config.json")) or any(path.glob("*.safetensors"))


def weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """(safetensors files, weight map of the index; None without an index). Raises: CheckpointError `no-weights`,
    `bad-index`."""
    if (folder / INDEX).is_file():
        listed = read_index(folder)
        return sorted(set(listed.values())), listed
    existing = sorted(path.name for path in folder.glob("*.safetensors"))
    names = [SINGLE] if SINGLE in existing else existing
    if not names:
        what = "has no safetensors files"
        raise CheckpointError(Problem("no-weights", what, str(folder), fix="name a folder with weights in that format"))
    return names, None


@contextmanager
def opened(folder: Path, name: str) -> Iterator[tuple[int, int]]:
    """(descriptor, size) of a file of a folder, open for reading."""
    descriptor, size = open_file(folder, name)
    try:
        yield descriptor, size
    finally:
        os.close(descriptor)


def inspect_checkpoint(path: Source, step: int | None = None) -> dict[str, Any]:
    """Describe a checkpoint as plain values. No tensor is read.

    Args:
        path: folder of one step, of a run, or in Hugging Face's layout; or several, the folders of nodes that share
            none.
        step: which step of a run. Default: the newest.

    Returns: for both layouts `kind`, `folder`, `model`, `holds` (weights, optimizer, rest: tensors, elements, bytes,
        dtypes), `files` (name -> bytes) and `tensors`. For a training checkpoint also step, mesh, ZeRO stage, plan,
        versions, optimizers with the options of their groups, schedulers, and a summary of the other state. For one
        that nodes have saved in folders of their own, also `nodes`, and `absent_files`: those that are in none of the
        folders.
    Raises: CheckpointError `no-checkpoint`, and of `read_manifest` and `read_header`.
    """
    first, *others = sources_of(path)
    if step is None and not others and is_hub_folder(first):
        return _inspect_hub(first)
    checkpoint = gather(path, step)
    folder, manifest = checkpoint.folders[0], checkpoint.manifest
    about, state = manifest.about, manifest.state
    kinds = {name: _kind(name, state) for name in manifest.tensors}
    return {
        "kind": "training checkpoint",
        "folder": str(folder),
        "step": manifest.step,
        "steps": list(folders.published(folder.parent)),
        **{key: about.get(key) for key in ("saved_at", "mesh", "world_size", "zero", "plan", "versions")},
        **{key: about[key] for key in ("reshaped_from", "converted_from") if key in about},
        **_nodes(checkpoint),
        "model": {"class": (about.get("model") or {}).get("class")},
        "holds": _holds(manifest.tensors.values(), kinds),
        "optimizers": {name: _optimizer(record) for name, record in (state.get("optimizers") or {}).items()},
        "schedulers": {name: _class(record.get("class")) for name, record in (state.get("schedulers") or {}).items()},
        "state": {
            **{key: bool(state.get(key)) for key in ("streams", "data", "values")},
            "user": list(state.get("user") or {}),
            "generators": len(state.get("generators") or {}),
        },
        "files": {name: info.num_bytes for name, info in manifest.files.items()},
        "tensors": {
            tensor.name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "pieces": len(tensor.slices),
                **tensor.about,
            }
            for tensor in manifest.tensors.values()
        },
    }


def _nodes(checkpoint: GatheredCheckpoint) -> dict[str, Any]:
    """The nodes that have saved a checkpoint, and the files that were not gathered; {} if all ranks shared a folder."""
    if not checkpoint.is_of_nodes:
        return {}
    present = checkpoint.present()
    return {
        "nodes": [{"host": node.host, "ranks": list(node.ranks)} for node in saving_nodes(checkpoint.manifest.about)],
        "absent_files": [name for name in checkpoint.manifest.files if name not in present],
    }


def _inspect_hub(folder: Path) -> dict[str, Any]:
    names, _ = weight_files(folder)
    config = read_hub_config(folder)
    tensors: list[SavedTensor] = []
    files, hashes = {}, True
    for name in names:
        with opened(folder, name) as (descriptor, size):
            header = read_header(descriptor, size, str(folder / name))
        files[name], hashes = size, hashes and KEY in header.metadata
        tensors += [SavedTensor(tensor.name, tensor.dtype, tensor.shape, ()) for tensor in header.entries.values()]
    return {
        "kind": "Hugging Face folder",
        "folder": str(folder),
        "model": {"class": next(iter(config.get("architectures") or ()), None), "type": config.get("model_type")},
        "transformers": config.get("transformers_version"),
        "hashes": hashes,
        "holds": _holds(tensors, dict.fromkeys((tensor.name for tensor in tensors), "weights")),
        "files": files,
        "tensors": {tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in tensors},
    }


def _kind(name: str, state: dict[str, Any]) -> str:
    prefix = name.partition("/")[0]
    if prefix == "model":
        return "weights"
    return "optimizer" if prefix in (state.get("optimizers") or {}) else "rest"


def _holds(tensors: Iterable[SavedTensor], kinds: dict[str, str]) -> dict[str, Any]:
    sums_by_kind: dict[str, Any] = {
        kind: {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": {}} for kind in ("weights", "optimizer", "rest")
    }
    for tensor in tensors:
        sums = sums_by_kind[kinds[tensor.name]]
        sums["tensors"] += 1
        sums["elements"] += volume(full_box(tensor.shape))
        sums["bytes"] += tensor.num_bytes
        sums["dtypes"][tensor.dtype] = sums["dtypes"].get(tensor.dtype, 0) + tensor.num_bytes
    return sums_by_kind


def _optimizer(record: dict[str, Any]) -> dict[str, Any]:
    groups = [
        {
            "options": {key: _plain(value) for key, value in group["options"].items()},
            "parameters": len(group["params"]),
        }
        for group in record["groups"]
    ]
    return {"class": _class(record.get("class")), "parameters": len(record.get("state") or {}), "groups": groups}


def _class(described: Any) -> str | None:
    return f"{described.get('module')}.{described.get('name')}" if isinstance(described, dict) else None


def _plain(value: Any) -> Any:
    """A value that `json_codec` has encoded, for display. Values without a short form are shown as their tag."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get("$")
    if tag == "tuple":
        return _plain(value["items"])
    if tag == "float":
        return value["value"]
    if tag == "tensor" and not value["shape"] and value["dtype"] in _STRUCTS:
        return struct.unpack(_STRUCTS[value["dtype"]], base64.b64decode(value["base64"]))[0]
    if tag in ("tensor", "stored_tensor"):
        return f"{value['dtype']} {value['shape']}"
    return f"<{tag}>" if tag else {key: _plain(item) for key, item in value.items()}


def total_bytes(path: Source, step: int | None = None) -> int:
    """The number of bytes that a check reads, for a progress line. 0 if it is unknown: the check then reports why."""
    try:
        holds = inspect_checkpoint(path, step)["holds"]
    except CheckpointError:
        return 0
    return sum(kind["bytes"] for kind in holds.values())
