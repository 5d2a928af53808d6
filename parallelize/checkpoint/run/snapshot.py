"""A training state at one moment, as one rank sees it: the tensors that it writes, and what it reports about them.

For a save in the background, everything is copied once, into buffers that the next save reuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallelize.base.errors import CheckpointError, Problem
from parallelize.base.layout import replicated
from parallelize.checkpoint.format.host_memory import Arena, code_of
from parallelize.checkpoint.format.json_encoder import TensorSink, encode
from parallelize.checkpoint.format.writer import TensorToWrite
from parallelize.checkpoint.run import optimizer_state, run_state
from parallelize.checkpoint.run.local_tensors import LocalTensor, ModelOnMesh, weights
from parallelize.checkpoint.run.run_contents import Run
from parallelize.checkpoint.run.scheduler_state import describe_scheduler
from parallelize.state.fsdp_shards import reshard_units
from parallelize.state.stored_slices import StoredTensor

T = torch.Tensor
Table = dict[str, list[Any]]
"""Tensor name -> [dtype, full shape, [[key, box]], about]: what a rank reports about the tensors it has written."""


@dataclass
class Snapshot:
    """One rank's part of a save."""

    step: int
    outgoing: list[TensorToWrite]
    table: Table
    state: dict[str, Any]


class Staging:
    """Copies of the tensors that a background save writes: allocated once, and reused while shapes stay the same."""

    def __init__(self) -> None:
        self.buffers: dict[str, T] = {}
        self._arena = Arena()
        self._used: set[str] = set()

    def begin(self) -> None:
        """Start a save."""
        self._used = set()

    def copy(self, key: str, value: T) -> T:
        """A copy on the CPU, which may not be complete before `end`."""
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = self.buffers[key] = self._allocate(value)
        self._used.add(key)
        return buffer.copy_(value.detach(), non_blocking=True)

    def _allocate(self, value: T) -> T:
        if value.device.type == "cuda":
            return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return self._arena.take(tuple(value.shape), value.dtype)

    def end(self) -> None:
        """Wait for copies from an accelerator, and drop buffers that this save has not used."""
        if any(buffer.is_pinned() for buffer in self.buffers.values()):
            torch.accelerator.synchronize()
        self.buffers = {key: buffer for key, buffer in self.buffers.items() if key in self._used}


def take(run: Run, on_mesh: ModelOnMesh, step: int, values: Any = None, staging: Staging | None = None) -> Snapshot:
    """The current state. Without `staging`, tensors are views, which must not change until they are written.

    Raises: CheckpointError `unsavable-state`, `unsavable-value`, `unsavable-dtype`, `foreign-parameter`, `extra-state`.
    """
    _check_extra_state(run.module)
    reshard_units(run.module)
    values_with_tensors = _TensorsInValues()
    tensors = weights(on_mesh)
    descriptions = {}
    for name, optimizer in run.optimizers.items():
        moments, descriptions[name] = optimizer_state.collect(on_mesh, name, optimizer, values_with_tensors)
        tensors += moments
    state = {"optimizers": descriptions} | _state(run, on_mesh, values, values_with_tensors)
    if staging is not None:
        staging.begin()
    outgoing: list[TensorToWrite] = []
    table: Table = {}
    for tensor in [*tensors, *values_with_tensors.tensors]:
        _add(tensor, outgoing, table, staging)
    if staging is not None:
        staging.end()
    return Snapshot(step, outgoing, table, state)


def _state(run: Run, on_mesh: ModelOnMesh, values: Any, sink: TensorSink) -> dict[str, Any]:
    state: dict[str, Any] = {"streams": run_state.collect_streams(on_mesh, run.streams, sink)}
    if run.generators:
        state["generators"] = run_state.collect_generators(on_mesh, sink)
    # every rank asks, because a user's own state_dict may be a collective
    user_states = {name: stateful.state_dict() for name, stateful in run.user.items()}
    state["data"] = run_state.collect_data(on_mesh, run.data, sink)
    if run_state.rank_of(on_mesh) == 0:
        state["position"] = run_state.collect_position(on_mesh, run.pipeline)
        state["schedulers"] = {name: describe_scheduler(scheduler) for name, scheduler in run.schedulers.items()}
        state["scheduled"] = {name: _owner_of(scheduler, run.optimizers) for name, scheduler in run.schedulers.items()}
        state["user"] = {name: encode(user, f"user.{name}", sink) for name, user in user_states.items()}
        state["values"] = encode(values, "values", sink)
    return state


def _owner_of(scheduler: Any, optimizers: Mapping[str, Optimizer]) -> str | None:
    """The name of the optimizer whose learning rates a scheduler sets."""
    inner = getattr(scheduler, "_schedulers", None) or [scheduler]
    owner = getattr(scheduler, "optimizer", None) or getattr(inner[0], "optimizer", None)
    return next((name for name, optimizer in optimizers.items() if optimizer is owner), None)


def _add(tensor: LocalTensor, outgoing: list[TensorToWrite], table: Table, staging: Staging | None) -> None:
    boxes = []
    for owned in tensor.owned():
        value = owned.value if staging is None else staging.copy(owned.key, owned.value)
        outgoing.append(TensorToWrite(owned.key, tensor.dtype, tuple(value.shape), _returning(value)))
        boxes.append([owned.key, [list(side) for side in owned.box]])
    if boxes or (tensor.owner and tensor.replica == 0 and 0 in tensor.stored.shape):  # an empty tensor has no box
        table[tensor.name] = [tensor.dtype, list(tensor.stored.shape), boxes, tensor.about]


def _returning(value: T) -> Callable[[], T]:
    return lambda: value


class _TensorsInValues:
    """A sink for tensors inside plain values: each is saved in full, by the rank that has it."""

    def __init__(self) -> None:
        self.tensors: list[LocalTensor] = []

    def __call__(self, where: str, tensor: T) -> str:
        name = f"state/{where}"
        if any(other.name == name for other in self.tensors):
            name = f"{name}#{len(self.tensors)}"
        if code_of(tensor.dtype) is None:
            what = f"{where} is of {tensor.dtype}, which safetensors files do not have"
            raise CheckpointError(Problem("unsavable-dtype", what, fix="keep it in another dtype"))
        copy = tensor.detach().to("cpu", copy=True)
        self.tensors.append(LocalTensor(name, _stored_in_full(name, copy), single_writer=True))
        return name


def _stored_in_full(name: str, tensor: T) -> StoredTensor:
    shape = tuple(tensor.shape)
    return StoredTensor(name, (name,), tensor, shape, replicated(shape, 1).slices(0))


def _check_extra_state(module: nn.Module) -> None:
    """Refuse modules with state that is not in their tensors."""
    for name, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            what = f"{name or 'the model'} ({type(inner).__name__}) has extra state, which is not a tensor"
            fix = "pass it as user={...}: an object with state_dict and load_state_dict"
            raise CheckpointError(Problem("extra-state", what, fix=fix))
