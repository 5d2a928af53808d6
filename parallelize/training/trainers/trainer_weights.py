"""Weights of a trainer's model in the format of `transformers`, in a folder that may have other files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from parallelize.base.errors import CheckpointError, Problem
from parallelize.checkpoint.hub.adapter_folder import save_adapter
from parallelize.checkpoint.hub.export import save_pretrained
from parallelize.checkpoint.hub.pretrained import load_pretrained
from parallelize.comm.handshake import agree_on

_WRITING = ".weights-being-written"
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def write_weights(parallel: Any, folder: Path) -> None:
    """Write weights and config into a folder, in place of earlier ones. A collective; all ranks write.

    Of a model with adapters of PEFT, these alone, as PEFT writes them.

    Raises: CheckpointError as `save_pretrained` or `save_adapter`.
    """
    writing = folder / _WRITING
    first = dist.get_rank() == 0
    with agree_on(parallel.mesh):
        if first:
            shutil.rmtree(writing, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
    save = save_adapter if _has_adapters(parallel) else save_pretrained
    save(parallel, writing)
    with agree_on(parallel.mesh):
        if first:
            for path in [path for pattern in _WEIGHTS for path in folder.glob(pattern)]:
                path.unlink()
            for path in writing.iterdir():
                if path.is_dir():  # of an adapter with a name of its own
                    shutil.rmtree(folder / path.name, ignore_errors=True)
                os.replace(path, folder / path.name)
            writing.rmdir()


def read_weights(parallel: Any, folder: Path) -> None:
    """Load what `write_weights` or `transformers` wrote. A collective. Raises: CheckpointError as `load_pretrained`, `missing-file`."""
    if not folder.is_dir():
        what = "there is no folder of this name to load weights from"
        raise CheckpointError(Problem("missing-file", what, str(folder), fix="the path of a checkpoint of this run"))
    if _has_adapters(parallel):
        _read_adapters(parallel.module, folder)
    else:
        load_pretrained(parallel.module, folder)


def _has_adapters(parallel: Any) -> bool:
    return hasattr(parallel.module, "peft_config")


def _read_adapters(model: Any, folder: Path) -> None:
    """PEFT writes the adapter `default` into the folder itself, and others into one of their name."""
    from peft import set_peft_model_state_dict

    for name in model.peft_config:
        file = (folder if name == "default" else folder / name) / "adapter_model.safetensors"
        if not file.is_file():
            what = f"there are no weights of the adapter {name}"
            raise CheckpointError(Problem("missing-file", what, str(file), fix="the path of a checkpoint of this run"))
        set_peft_model_state_dict(model, load_file(file), adapter_name=name)
