"""What stands beside the weights in a Hugging Face folder: configs, and files that are carried along."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelize.checkpoint import disk
from parallelize.checkpoint.stock_class import class_of
from parallelize.errors import CheckpointError, Problem
from parallelize.local_config import whole_config

_WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")
_WRITTEN = ("config.json", "generation_config.json")


def write_extras(module: nn.Module, folder: Path, dtype: torch.dtype | None, carry: str | os.PathLike | None) -> None:
    """config.json and generation_config.json of a `transformers` model, and what `carry` holds beside weights."""
    config: Any = whole_config(getattr(module, "config", None))
    if hasattr(config, "save_pretrained"):
        kept = {name: getattr(config, name, None) for name in ("architectures", "dtype")}
        try:
            config.architectures = [class_of(module).__name__]
            if dtype is not None:
                config.dtype = str(dtype).removeprefix("torch.")
            config.save_pretrained(folder)
        finally:
            for name, value in kept.items():
                setattr(config, name, value)
        generation: Any = getattr(module, "generation_config", None)
        if generation is not None and module.can_generate():  # type: ignore[operator]
            generation.save_pretrained(folder)
    if carry is not None:
        carry_files(Path(carry), folder)


def carry_files(source: Path, folder: Path) -> None:
    """Copy files that are no weights, and that are not there. Raises: CheckpointError `missing-file`."""
    if not source.is_dir():
        raise CheckpointError(Problem("missing-file", "there is no such folder to carry files from", str(source)))
    for path in sorted(source.iterdir()):
        plain = path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHTS)
        if plain and path.name not in _WRITTEN and not (folder / path.name).exists():
            disk.write_file(folder / path.name, path.read_bytes())
