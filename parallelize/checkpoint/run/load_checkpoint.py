"""`load_checkpoint`: weights, and optionally more, of a checkpoint that another run has saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.format import folders
from parallelize.checkpoint.run.load import LoadOptions, load_run
from parallelize.checkpoint.run.local_tensors import model_on_mesh
from parallelize.checkpoint.run.node_files import choose_step
from parallelize.checkpoint.run.rank_sync import TIMEOUT_S, RankSync
from parallelize.checkpoint.run.run_contents import run_of

if TYPE_CHECKING:
    from parallelize.axes.pipeline.parallel_model import ParallelModel

Named = Mapping[str, Any] | Any | None


def load_checkpoint(
    folder: str | os.PathLike,
    model: ParallelModel | nn.Module,
    *,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    scheduler: Named = None,
    step: int | None = None,
    mesh: DeviceMesh | None = None,
    shared: bool = True,
    strict: bool = True,
    cast: bool = False,
    check: bool = True,
    resize_vocabulary: bool = False,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Load weights, and optionally more, of a checkpoint into a model on any mesh: to serve it, or to fine-tune it.

    A collective over all processes. A model on the meta device is allocated first, and filled in place.

    Args:
        folder: the folder of one step, or of a run. Of a run, `step` or the newest step is loaded.
        model: a `ParallelModel`, or a module on any or no mesh.
        optimizer: one, or several by the names under which they were saved.
        scheduler: one, or several by name.
        step: which checkpoint of a run. None: the newest.
        mesh: the mesh of all processes, if the model has none.
        shared: all ranks see the folder. False: they may not, and receive from others the files that they do not see.
        strict: a missing or unexpected tensor is an error.
        cast: dtypes may lose precision, as for float32 weights in a bfloat16 model.
        check: compare the hash of everything that is read.
        resize_vocabulary: of a checkpoint with another number of tokens, load those that both have. More tokens of the
            model keep their values, and their optimizer states are zero.
        timeout_s: how long ranks wait for each other, in seconds.
        progress: called with the number of bytes after each read.

    Returns: the checkpoint's step.
    Raises: CheckpointError with file and tensor, on every rank, before anything is changed: `missing-tensor`,
        `unexpected-tensor`, `wrong-shape`, `missing-rows`, `narrower-dtype`, `missing-state`, `other-checkpoint`,
        `missing-node-files` and those of damaged files.
    Cost: each rank reads its own elements only; with `check`, those in use are read twice, the second time from the
        page cache. Short messages are sent, and no tensors but, with `shared=False`, those of files that a rank does
        not see.
    """
    _, on_mesh = model_on_mesh(model, mesh)
    run = run_of(model, optimizer=optimizer, scheduler=scheduler)
    sync = RankSync(on_mesh.mesh, timeout_s, own_group=False)
    try:
        path = _folder_of_step(folder, step, sync, shared)
        options = LoadOptions(strict, cast, check, resize_vocabulary, progress)
        return load_run(path, run, on_mesh, sync, options, shared=shared).manifest.step
    finally:
        sync.close()


def _folder_of_step(folder: str | os.PathLike, step: int | None, sync: RankSync, shared: bool) -> Path:
    """The folder to load. Raises: CheckpointError of `folders.resolve` or `choose_step`, on every rank."""
    if not shared:
        return choose_step(folder, step, sync)[0]
    error, path = None, None
    try:
        path = folders.resolve(folder, step)
    except CheckpointError as caught:
        error = caught
    sync.agree(error)
    assert path is not None
    return path
