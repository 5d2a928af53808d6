"""The files of a Hugging Face folder that are not weights: configs, and files copied from another folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.files.paths import copy_file, open_file
from parallelize.checkpoint.format import disk
from parallelize.state.local_config import class_of, full_config

_WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")
_CONFIG, _GENERATION = "config.json", "generation_config.json"


def write_extras(module: nn.Module, folder: Path, dtype: torch.dtype | None, carry: str | os.PathLike | None) -> None:
    """Write config.json and generation_config.json of a `transformers` model, and copy the files of `carry` that are
    not weights; its generation_config.json where the model's says no more than its config does.

    Args:
        module: the module whose config is written.
        folder: the folder to write to.
        dtype: the dtype of the weights, for config.json.
        carry: a folder.
    """
    config: Any = full_config(getattr(module, "config", None))
    if hasattr(config, "save_pretrained"):
        saved = {name: getattr(config, name, None) for name in ("architectures", "dtype")}
        try:
            config.architectures = [class_of(module).__name__]
            if dtype is not None:
                config.dtype = str(dtype).removeprefix("torch.")
            config.save_pretrained(folder)
        finally:
            for name, value in saved.items():
                setattr(config, name, value)
        generation: Any = getattr(module, "generation_config", None)
        if generation is not None and module.can_generate() and not _is_carried(generation, config, carry):  # type: ignore[operator]
            _write_generation(generation, folder)
    if carry is not None:
        carry_files(Path(carry), folder)


def _is_carried(generation: Any, config: Any, carry: str | os.PathLike | None) -> bool:
    """Whether the file of `carry` is copied as it is: the model has its settings, or those with which its config builds
    any model."""
    if carry is None or not (Path(carry) / _GENERATION).is_file():
        return False
    cls = type(generation)
    return generation in (cls.from_model_config(config), cls.from_pretrained(carry))


def _write_generation(generation: Any, folder: Path) -> None:
    try:
        generation.save_pretrained(folder)
    except ValueError:  # transformers reads some published ones with a warning, and refuses to write them
        disk.write_file(folder / _GENERATION, generation.to_json_string().encode())


def read_generation_config(module: Any, folder: str | os.PathLike) -> Any:
    """The settings of generation in a folder, for a `transformers` model that has some; None where there are none."""
    generation = getattr(module, "generation_config", None)
    has_file = (Path(folder) / _GENERATION).is_file()
    return type(generation).from_pretrained(folder) if generation is not None and has_file else None


def carry_files(source: Path, folder: Path) -> None:
    """Copy the files that are not weights and do not exist in `folder`.

    Raises: CheckpointError `missing-file`; `unsafe-path` for a link out of the folder, whose target would be published.
    """
    for name in carried_files(source):
        if not (folder / name).exists():
            copy_file(source, name, folder / name)


def carried_files(source: Path) -> list[str]:
    """The files of a folder that `carry_files` copies, all of which can be opened. Raises: as it."""
    if not source.is_dir():
        raise CheckpointError(Problem("missing-file", "the folder to copy files from does not exist", str(source)))
    files = sorted(path.name for path in source.iterdir() if path.is_file())
    names = [name for name in files if not name.startswith(".") and not name.endswith(_WEIGHTS) and name != _CONFIG]
    for name in names:
        descriptor, _ = open_file(source, name)
        os.close(descriptor)
    return names
