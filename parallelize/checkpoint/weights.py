"""Loading weights from either kind of folder: a training checkpoint, or Hugging Face's layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from parallelize.checkpoint.format import folders
from parallelize.checkpoint.format.manifest import NAME
from parallelize.checkpoint.hub.pretrained import load_pretrained
from parallelize.checkpoint.run.load_checkpoint import load_checkpoint


def load_weights(
    module: nn.Module, folder: str | os.PathLike, *, mesh: DeviceMesh | None = None, device: Any = None
) -> None:
    """Load weights into a model, which may be on the meta device. A collective over all processes.

    Args:
        module: the module to fill.
        folder: the folder of a run, of one step, or of a Hugging Face model.
        mesh: the mesh of all processes, if the module has none.
        device: the device on which `load_pretrained` allocates a model that is on the meta device.

    Raises: as `load_checkpoint` and `load_pretrained`.
    """
    path = Path(folder)
    if (path / NAME).is_file() or folders.published(path):
        load_checkpoint(path, module, mesh=mesh, cast=True)
    else:
        load_pretrained(module, path, mesh=mesh, device=device)
