"""Optimisers and schedulers out of a checkpoint alone: class, groups and options stand in the manifest."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from parallelize.checkpoint import folders
from parallelize.checkpoint.checkpointer import load_checkpoint
from parallelize.checkpoint.held import Place, placed
from parallelize.checkpoint.manifest import read_manifest
from parallelize.checkpoint.schedulers import build_scheduler, check_buildable, optimizer_class
from parallelize.checkpoint.tree_reader import decode
from parallelize.errors import CheckpointError, Problem
from parallelize.pieces import named_once
from parallelize.zero.optimizer import build_optimizer


@dataclass(frozen=True)
class Rebuilt:
    """What `rebuild` made, by the names under which it was saved."""

    step: int
    optimizers: dict[str, Optimizer]
    schedulers: dict[str, Any]


def rebuild(
    model: Any, folder: str | os.PathLike, *, step: int | None = None, mesh: DeviceMesh | None = None
) -> Rebuilt:
    """Load a checkpoint, and build the optimisers and schedulers that it was saved with. A collective over all processes.

    Only classes of `torch.optim` are built; of a scheduler that calls functions (`LambdaLR`) the functions are not kept.

    Args:
        model: as `Checkpointer` takes it, after it was wrapped. folder, step: as `load_checkpoint` takes them.

    Raises: CheckpointError `unknown-class`, `unsaved-function`, and of `load_checkpoint`.
    """
    module, place = placed(model, mesh)
    path = folders.resolve(folder, step)
    state = read_manifest(path).state
    described = state.get("schedulers") or {}
    for one in described.values():
        check_buildable(one)  # before anything is loaded
    optimizers = {name: _optimizer(module, place, share) for name, share in state.get("optimizers", {}).items()}
    found = load_checkpoint(path, model, optimizer=optimizers, mesh=mesh)
    schedulers = {}
    for name, one in described.items():
        owner = optimizers.get((state.get("scheduled") or {}).get(name))
        if owner is None:
            what = f"scheduler {name} was saved without the optimiser that it is of"
            raise CheckpointError(Problem("no-optimizer-state", what, fix="build it yourself, and load its state"))
        schedulers[name] = build_scheduler(owner, one)
    return Rebuilt(found, optimizers, schedulers)


def _optimizer(module: nn.Module, place: Place, share: dict[str, Any]) -> Optimizer:
    """A new optimiser of the saved class, with the saved groups, of this rank's parameters."""
    cls = optimizer_class(share["class"])
    parameters = {place.canonical(names[0]): parameter for names, parameter in named_once(module)}
    groups = []
    for group in share["groups"]:
        options = {key: decode(value, None, f"optimizer.{key}") for key, value in group["options"].items()}
        groups.append({"params": [parameters[name] for name in group["params"] if name in parameters], **options})
    known = set(inspect.signature(cls).parameters) - {"params"}
    defaults = {key: value for key, value in groups[0].items() if key in known}
    return build_optimizer(module, cls, groups, **defaults)
