"""What a checkpoint of a run contains: the model, and the objects around it whose state is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from parallelize.axes.pipeline.parallel_model import ParallelModel
from parallelize.base.errors import CheckpointError, Problem
from parallelize.checkpoint.run.local_tensors import bare
from parallelize.state.randomness.streams import Streams


@dataclass
class Run:
    """What a checkpoint contains. Everything but the model may be absent.

    Attributes:
        optimizers, schedulers: by name. user: objects with `state_dict` and `load_state_dict`, by name; the first
            rank's state is saved. data: one such object, for the position in the data. generators: save the generators
            of torch, Python and NumPy.
    """

    module: nn.Module
    pipeline: Any = None
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    streams: Streams | None = None
    data: Any = None
    user: Mapping[str, Any] = field(default_factory=dict)
    generators: bool = True


def run_of(
    model: ParallelModel | nn.Module,
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    streams: Streams | None = None,
    data: Any = None,
    user: Mapping[str, Any] | None = None,
    generators: bool = False,
) -> Run:
    """What a checkpoint contains.

    Raises: CheckpointError `not-stateful` for an object without a state to save, `bad-name`.
    """
    stateful = {"data": data} if data is not None else {}
    for name, value in [*stateful.items(), *(user or {}).items()]:
        if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            what = f"{name} is of type {type(value).__name__}, which has no state_dict and load_state_dict"
            raise CheckpointError(Problem("not-stateful", what, fix="pass plain values as save(step, values=...)"))
    if isinstance(model, nn.Module):
        module, pipeline = model, None
    else:
        module, pipeline = model.module, model.pipeline
    return Run(
        bare(module),
        pipeline,
        _named(optimizer, "optimizer"),
        _named(scheduler, "scheduler"),
        streams,
        data,
        dict(user or {}),
        generators,
    )


def _named(value: Any, default_name: str) -> dict[str, Any]:
    """Optimizers or schedulers by name. The names begin the names of tensors, and must not be those of other
    tensors."""
    if value is None:
        return {}
    by_name = dict(value) if isinstance(value, Mapping) else {default_name: value}
    for name in by_name:
        if not isinstance(name, str) or "/" in name or name in ("model", "state"):
            what = f"{name!r} cannot be the name of an optimizer or scheduler"
            raise CheckpointError(Problem("bad-name", what, fix='use a string without "/", not "model" or "state"'))
    return by_name
