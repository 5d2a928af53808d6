"""Optimizers and schedulers from a checkpoint alone: the manifest contains class, groups and options."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from parallelize.axes.zero.optimizer import build_optimizer
from parallelize.base.errors import CheckpointError, Problem
from parallelize.checkpoint.format import folders
from parallelize.checkpoint.format.json_codec import decode
from parallelize.checkpoint.format.manifest import read_manifest
from parallelize.checkpoint.run.load_checkpoint import load_checkpoint
from parallelize.checkpoint.run.local_tensors import ModelOnMesh, model_on_mesh
from parallelize.checkpoint.run.node_files import choose_step, shared_manifest
from parallelize.checkpoint.run.rank_sync import RankSync
from parallelize.checkpoint.run.run_state import build_scheduler, check_buildable, optimizer_class
from parallelize.plan.model_facts import named_once


@dataclass(frozen=True)
class Rebuilt:
    """What `rebuild` made.

    Attributes:
        step: the step of the checkpoint.
        optimizers, schedulers: the optimizers and schedulers, by the names under which they were saved.
    """

    step: int
    optimizers: dict[str, Optimizer]
    schedulers: dict[str, Any]


def rebuild(
    model: Any,
    folder: str | os.PathLike,
    *,
    step: int | None = None,
    mesh: DeviceMesh | None = None,
    shared: bool = True,
) -> Rebuilt:
    """Load a checkpoint, and build the optimizers and schedulers that it was saved with. A collective over all
    processes.

    Only classes of `torch.optim` are built. For a scheduler that calls functions (`LambdaLR`), the functions are not
    saved.

    Args:
        model: a `ParallelModel`, or a module on any or no mesh, after it was wrapped.
        folder: the folder of one step, or of a run. Of a run, `step` or the newest step is loaded.
        step: which checkpoint of a run. Default: the newest.
        mesh: the mesh of all processes, if the model has none.
        shared: as of `load_checkpoint`.

    Returns: the step, and the optimizers and schedulers by name.
    Raises: CheckpointError `unknown-class`, `unsaved-function`, `no-optimizer-state`, and those of `load_checkpoint`.
    Cost: that of `load_checkpoint`.
    """
    module, on_mesh = model_on_mesh(model, mesh)
    path, state = _saved_state(folder, step, on_mesh, shared)
    with _errors_of_manifest("optimizers and schedulers"):
        saved_schedulers = dict(state.get("schedulers") or {})
        scheduled = dict(state.get("scheduled") or {})
        for described in saved_schedulers.values():
            check_buildable(described)  # before anything is loaded
        saved_optimizers = dict(state.get("optimizers") or {})
    optimizers = {}
    for name, described in saved_optimizers.items():
        with _errors_of_manifest(f"optimizer {name}"):
            optimizers[name] = _optimizer(module, on_mesh, described)
    loaded_step = load_checkpoint(path, model, optimizer=optimizers, mesh=mesh, shared=shared)
    schedulers = {}
    for name, described in saved_schedulers.items():
        optimizer = optimizers.get(str(scheduled.get(name)))
        if optimizer is None:
            what = f"scheduler {name} was saved without the optimizer whose learning rates it sets"
            raise CheckpointError(Problem("no-optimizer-state", what, fix="build it yourself, and load its state"))
        schedulers[name] = build_scheduler(optimizer, described)
    return Rebuilt(loaded_step, optimizers, schedulers)


@contextmanager
def _errors_of_manifest(what: str) -> Iterator[None]:
    """Around what is made as a manifest says, which anybody may have edited. Raises: CheckpointError `bad-value`."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
        text = f"the manifest describes no {what} that can be built: {reason}"
        fix = (
            "use another checkpoint; this one was damaged or edited; or build it yourself, and pass it to "
            "load_checkpoint"
        )
        raise CheckpointError(Problem("bad-value", text, fix=fix)) from error


def _saved_state(
    folder: str | os.PathLike, step: int | None, on_mesh: ModelOnMesh, shared: bool
) -> tuple[Path, dict[str, Any]]:
    """The folder of the step, and what its manifest says."""
    if shared:
        path = folders.resolve(folder, step)
        return path, read_manifest(path).state
    sync = RankSync(on_mesh.mesh, own_group=False)
    try:
        path, _ = choose_step(folder, step, sync)
        return path, shared_manifest(path, sync).state
    finally:
        sync.close()


def _optimizer(module: nn.Module, on_mesh: ModelOnMesh, described: dict[str, Any]) -> Optimizer:
    """A new optimizer of the saved class, with the saved groups, of this rank's parameters."""
    cls = optimizer_class(described["class"])
    parameters = {on_mesh.canonical(names[0]): parameter for names, parameter in named_once(module)}
    groups = []
    for group in described["groups"]:
        options = {key: decode(value, None, f"optimizer.{key}") for key, value in group["options"].items()}
        groups.append({"params": [parameters[name] for name in group["params"] if name in parameters], **options})
    accepted = set(inspect.signature(cls).parameters) - {"params"}
    defaults = {key: value for key, value in groups[0].items() if key in accepted}
    return build_optimizer(module, cls, groups, **defaults)
