"""An optimiser's state out of a checkpoint: matched by parameter name, read beside, put in place when everything is right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallelize import _torch_private as private
from parallelize.checkpoint.fill import Files, Job, jobs_for, read_whole, room_for
from parallelize.checkpoint.held import Held, Place
from parallelize.checkpoint.manifest import Saved
from parallelize.checkpoint.memory import torch_dtype
from parallelize.checkpoint.optimizers import OWN_WAY, parameters_of
from parallelize.checkpoint.tree_reader import decode
from parallelize.errors import CheckpointError, Problem, did_you_mean

T = torch.Tensor


@dataclass
class Restored:
    """New state for an optimiser. `moments`: (parameter, key, local values); `values`: (parameter, key, value, on device)."""

    optimizer: Optimizer
    parameters: list[Any] = field(default_factory=list)
    moments: list[tuple[Any, str, T]] = field(default_factory=list)
    values: list[tuple[Any, str, Any, bool]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)

    def apply(self) -> None:
        for parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)
        for parameter, key, local in self.moments:
            self.optimizer.state[parameter][key] = _like(parameter, local.to(parameter.device))
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for parameter, key, value, on_device in self.values:
            group = groups[id(parameter)]
            if isinstance(value, T):
                there = on_device or (key == "step" and (group.get("capturable") or group.get("fused")))
                value = value.to(parameter.device if there else "cpu")
            self.optimizer.state[parameter][key] = value
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            group.update({key: value for key, value in options.items() if key not in OWN_WAY})
        steps: Any = getattr(self.optimizer, "_local_steps", None)
        if steps is not None:
            steps.forget()


def _like(parameter: Any, local: T) -> T:
    """Local values as what stands for them in the optimiser's state."""
    if not isinstance(parameter, DTensor):
        return local
    return private.wrap(local, private.with_dtype(private.spec_of(parameter), local))


def plan_optimizer(
    place: Place, called: str, optimizer: Optimizer, share: dict[str, Any], files: Files, strict: bool
) -> tuple[Restored, list[Job]]:
    """(what to put in place, what to read for it). Nothing is changed.

    Raises: CheckpointError `other-optimizer`, `missing-parameter`, `wrong-shape`, `groups-differ`, `missing-tensor`,
        `unsavable-state`.
    """
    _check_class(optimizer, share)
    restored, jobs = Restored(optimizer), []
    group_of = {name: number for number, group in enumerate(share["groups"]) for name in group["params"]}
    groups: dict[int, set[int]] = {}
    unknown = []
    for number, parameter, name, held in parameters_of(place, optimizer):
        if name not in group_of:
            unknown.append(name)
            continue
        restored.parameters.append(parameter)
        groups.setdefault(number, set()).add(group_of[name])
        saved = share["state"].get(name)
        if saved is not None:
            jobs += _plan_parameter(restored, parameter, name, held, called, saved, files)
    if unknown and strict:
        what = (
            f"the {type(optimizer).__name__} steps {unknown[0]} and {len(unknown) - 1} more that the saved one did not"
        )
        raise CheckpointError(Problem("missing-parameter", what, fix=did_you_mean(unknown[0], group_of)))
    restored.options = _options(optimizer, share, groups, files)
    return restored, jobs


def _check_class(optimizer: Optimizer, share: dict[str, Any]) -> None:
    name = type(optimizer).__qualname__
    if share["class"].get("name") != name:
        what = f"the state is that of a {share['class'].get('name')}, the optimiser is a {name}"
        raise CheckpointError(
            Problem("other-optimizer", what, fix="build the same class, or load without an optimiser")
        )


def _plan_parameter(
    restored: Restored, parameter: Any, name: str, held: Held, called: str, saved: dict[str, Any], files: Files
) -> list[Job]:
    jobs = []
    for key in saved["tensors"]:
        full = f"{called}/{name}/{key}"
        one = files.manifest.tensors.get(full)
        if one is None:
            raise CheckpointError(Problem("missing-tensor", f"no tensor {full!r} was saved", str(files.folder)))
        if one.shape != held.stored.shape:
            what = f"{key} of {name} was saved as {list(one.shape)}, the parameter is {list(held.stored.shape)}"
            raise CheckpointError(Problem("wrong-shape", what, str(files.folder)))
        dtype = _dtype_of_moment(one, files.manifest.tensors.get(f"model/{name}"), parameter)
        own = _own_room(restored.optimizer, parameter, key, dtype)
        room = room_for(held.stored, dtype, files.arena) if own is None else own
        restored.moments.append((parameter, key, room))
        jobs += jobs_for(files, one, held.stored, room, hidden=own is None)
    for key, value in saved["values"].items():
        decoded = decode(value, lambda where: read_whole(files, where), f"{called}.{name}.{key}")
        if isinstance(decoded, T) and decoded.numel() != 1 and held.stored.axes:
            what = f"{key} of {name} is {list(decoded.shape)}, and the parameter is cut over {sorted(held.stored.axes)}"
            raise CheckpointError(Problem("unsavable-state", what, fix="load it where the parameter is whole"))
        restored.values.append((parameter, key, decoded, key in saved["on_device"]))
    return jobs


def _dtype_of_moment(saved: Saved, weight: Saved | None, parameter: Any) -> torch.dtype:
    """A moment that was kept in its parameter's dtype is kept in that of the new one."""
    follows = weight is not None and weight.dtype == saved.dtype and parameter.is_floating_point()
    return parameter.dtype if follows else torch_dtype(saved.dtype)


def _own_room(optimizer: Optimizer, parameter: Any, key: str, dtype: torch.dtype) -> T | None:
    """Where this state lies already, if it is like what was saved."""
    held = optimizer.state.get(parameter, {}).get(key)
    local = private.local_of(held) if isinstance(held, DTensor) else held
    like = private.local_of(parameter) if isinstance(parameter, DTensor) else parameter
    fits = isinstance(local, T) and (local.shape, local.dtype, local.device) == (like.shape, dtype, like.device)
    return local if fits else None


def _options(
    optimizer: Optimizer, share: dict[str, Any], groups: dict[int, set[int]], files: Files
) -> list[dict[str, Any]]:
    """What each group of the optimiser is to be set to. A group takes it from the saved one that its parameters were in."""
    found: list[dict[str, Any]] = []
    for number in range(len(optimizer.param_groups)):
        options = [share["groups"][place]["options"] for place in sorted(groups.get(number, ()))]
        if any(one != options[0] for one in options):
            what = f"group {number} joins parameters of {len(options)} saved groups with different options"
            raise CheckpointError(
                Problem("groups-differ", what, fix="build the optimiser with the groups it was saved with")
            )
        same_number = [group["options"] for group in share["groups"] if group["number"] == number]
        given = (options or same_number or [{}])[0]  # a pipeline stage may hold none of a group's parameters
        found.append(
            {
                key: decode(one, lambda where: read_whole(files, where), f"group {number}.{key}")
                for key, one in given.items()
            }
        )
    return found
