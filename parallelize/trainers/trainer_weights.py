"""Weights of a trainer's model in the format of `transformers`, in a folder that may have other files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from parallelize.checkpoint.hub.export import save_pretrained
from parallelize.checkpoint.hub.pretrained import load_pretrained
from parallelize.comm.handshake import agree_on
from parallelize.errors import CheckpointError, Problem

_WRITING = ".weights-being-written"
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def write_weights(parallel: Any, folder: Path) -> None:
    """Write weights and config into a folder, in place of earlier ones. A collective; all ranks write.

    The weights of adapters alone, for a model that has some, belong here too.

    Raises: CheckpointError as `save_pretrained`.
    """
    writing = folder / _WRITING
    first = dist.get_rank() == 0
    with agree_on(parallel.mesh):
        if first:
            shutil.rmtree(writing, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
    save_pretrained(parallel, writing)
    with agree_on(parallel.mesh):
        if first:
            for path in [path for pattern in _WEIGHTS for path in folder.glob(pattern)]:
                path.unlink()
            for path in writing.iterdir():
                os.replace(path, folder / path.name)
            writing.rmdir()


def read_weights(parallel: Any, folder: Path) -> None:
    """Load what `write_weights` or `transformers` wrote. A collective. Raises: CheckpointError as `load_pretrained`, `missing-file`."""
    if not folder.is_dir():
        what = "there is no folder of this name to load weights from"
        raise CheckpointError(Problem("missing-file", what, str(folder), fix="the path of a checkpoint of this run"))
    load_pretrained(parallel.module, folder)
