"""Weights out of whatever folder: a training checkpoint of this package, or Hugging Face's layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.checkpoint import folders
from parallelize.checkpoint.checkpointer import load_checkpoint
from parallelize.checkpoint.manifest import NAME
from parallelize.checkpoint.pretrained import load_pretrained


def load_weights(
    module: nn.Module, folder: str | os.PathLike, *, mesh: DeviceMesh | None = None, device: Any = None
) -> None:
    """Fill a model, on meta or not. Raises: as `load_checkpoint` and `load_pretrained`."""
    path = Path(folder)
    if (path / NAME).is_file() or folders.published(path):
        load_checkpoint(path, module, mesh=mesh, cast=True)
    else:
        load_pretrained(module, path, mesh=mesh, device=device)
