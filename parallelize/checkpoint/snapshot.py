"""A training state at one moment, as one rank sees it: what it will write, and what it has to say.

For a save in the background everything is copied once, into buffers that the next save uses again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from parallelize.checkpoint import optimizers as optimizer_state
from parallelize.checkpoint import run_state
from parallelize.checkpoint.held import Held, Place, weights
from parallelize.checkpoint.memory import Arena, code_of
from parallelize.checkpoint.schedulers import describe_scheduler
from parallelize.checkpoint.trees import encode
from parallelize.checkpoint.writer import Outgoing
from parallelize.errors import CheckpointError, Problem
from parallelize.layout import replicated
from parallelize.pieces import Stored
from parallelize.randomness.streams import Streams

T = torch.Tensor
Table = dict[str, list[Any]]
"""Tensor name -> [dtype, full shape, [[key, box]], about]: what a rank tells of what it has written."""


@dataclass
class Run:
    """What a checkpoint is of. Everything but the model may be absent.

    Attributes:
        optimizers, schedulers: by name. user: objects with `state_dict` and `load_state_dict`, by name; the first rank's
            state is kept. data: one such object, for the position in the data. generators: keep torch's, Python's and
            NumPy's own.
    """

    module: nn.Module
    pipeline: Any = None
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    streams: Streams | None = None
    data: Any = None
    user: Mapping[str, Any] = field(default_factory=dict)
    generators: bool = True


@dataclass
class Snapshot:
    """One rank's share of a save."""

    step: int
    outgoing: list[Outgoing]
    table: Table
    state: dict[str, Any]


class Staging:
    """Copies of what a background save writes: made once, used again while shapes stay."""

    def __init__(self) -> None:
        self.held: dict[str, T] = {}
        self._arena = Arena()
        self._used: set[str] = set()

    def begin(self) -> None:
        self._used = set()

    def copy(self, key: str, value: T) -> T:
        kept = self.held.get(key)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            pinned = value.device.type == "cuda"
            kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=True) if pinned else None
            kept = self._arena.take(tuple(value.shape), value.dtype) if kept is None else kept
            self.held[key] = kept
        self._used.add(key)
        return kept.copy_(value.detach(), non_blocking=True)

    def end(self) -> None:
        """Wait for what an accelerator still copies, and let go of buffers that nothing needs any more."""
        if any(one.is_pinned() for one in self.held.values()):
            torch.accelerator.synchronize()
        self.held = {key: value for key, value in self.held.items() if key in self._used}


def take(run: Run, place: Place, step: int, values: Any = None, staging: Staging | None = None) -> Snapshot:
    """The state now. Without `staging` tensors are views, which must not change until they are written.

    Raises: CheckpointError `unsavable-state`, `unsavable-value`, `unsavable-dtype`, `foreign-parameter`, `extra-state`.
    """
    _check_extra_state(run.module)
    fold(run.module)
    loose = _Loose(place)
    tensors = weights(place)
    shares = {}
    for name, optimizer in run.optimizers.items():
        held, shares[name] = optimizer_state.collect(place, name, optimizer, loose)
        tensors += held
    state = {"optimizers": shares} | _state(run, place, values, loose)
    if staging is not None:
        staging.begin()
    outgoing: list[Outgoing] = []
    table: Table = {}
    for one in [*tensors, *loose.held]:
        _add(one, outgoing, table, staging)
    if staging is not None:
        staging.end()
    return Snapshot(step, outgoing, table, state)


def _state(run: Run, place: Place, values: Any, sink: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"streams": run_state.collect_streams(place, run.streams, sink)}
    if run.generators:
        state["generators"] = run_state.collect_generators(place, sink)
    # every rank asks, since a user's own state_dict may be a collective
    users = {name: one.state_dict() for name, one in run.user.items()}
    state["data"] = run_state.collect_data(place, run.data, sink)
    if run_state.rank_of(place) == 0:
        state["position"] = run_state.collect_position(place, run.pipeline)
        state["schedulers"] = {name: describe_scheduler(one) for name, one in run.schedulers.items()}
        state["scheduled"] = {name: _scheduled(one, run.optimizers) for name, one in run.schedulers.items()}
        state["user"] = {name: encode(one, f"user.{name}", sink) for name, one in users.items()}
        state["values"] = encode(values, "values", sink)
    return state


def _scheduled(scheduler: Any, optimizers: Mapping[str, Optimizer]) -> str | None:
    """The name of the optimiser whose rates a scheduler sets."""
    inner = getattr(scheduler, "_schedulers", None) or [scheduler]
    owner = getattr(scheduler, "optimizer", None) or getattr(inner[0], "optimizer", None)
    return next((name for name, one in optimizers.items() if one is owner), None)


def _add(one: Held, outgoing: list[Outgoing], table: Table, staging: Staging | None) -> None:
    pieces = []
    for owned in one.owned():
        value = owned.value if staging is None else staging.copy(owned.key, owned.value)
        outgoing.append(Outgoing(owned.key, one.dtype, tuple(value.shape), lambda value=value: value))
        pieces.append([owned.key, [list(side) for side in owned.box]])
    if pieces or (one.owner and one.place == 0 and 0 in one.stored.shape):
        table[one.name] = [one.dtype, list(one.stored.shape), pieces, one.about]


class _Loose:
    """Tensors that stand in plain values: kept whole, by the rank that has them."""

    def __init__(self, place: Place):
        self.place = place
        self.held: list[Held] = []

    def __call__(self, where: str, tensor: T) -> str:
        name = f"state/{where}"
        if any(one.name == name for one in self.held):
            name = f"{name}#{len(self.held)}"
        if code_of(tensor.dtype) is None:
            what = f"{where} is of {tensor.dtype}, which safetensors files do not know"
            raise CheckpointError(Problem("unsavable-dtype", what, fix="keep it in another dtype"))
        copy = tensor.detach().to("cpu", copy=True)
        self.held.append(Held(name, _whole(name, copy), whole=True))
        return name


def _whole(name: str, tensor: T) -> Stored:
    shape = tuple(tensor.shape)
    return Stored(name, (name,), tensor, shape, replicated(shape, 1).slices(0))


def _check_extra_state(module: nn.Module) -> None:
    """Modules whose state is more than tensors keep it by themselves."""
    for name, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            what = f"{name or 'the model'} ({type(inner).__name__}) has extra state, which is no tensor"
            fix = "hand it over as user={...}: an object with state_dict and load_state_dict"
            raise CheckpointError(Problem("extra-state", what, fix=fix))


def fold(module: nn.Module) -> None:
    """Under `fully_shard`, parameters that a forward has left gathered are cut again."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
