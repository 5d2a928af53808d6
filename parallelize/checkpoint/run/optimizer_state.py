"""An optimizer's state by parameter name. State of a parameter's shape is laid out as the parameter.

shaped like the parameter (moments)        sharded as the parameter, on any mesh
one element (step counts)                  the same on every rank, saved once
anything else (factored moments)           saved in full where the parameter is not sharded, refused by name where it is
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.shard_data import data_of
from parallelize.base.errors import CheckpointError, Problem, short_list
from parallelize.checkpoint.format.json_encoder import TensorSink, encode
from parallelize.checkpoint.run.local_tensors import LocalTensor, ModelOnMesh
from parallelize.checkpoint.run.scheduler_state import describe_optimizer_class
from parallelize.state.stored_slices import StoredSlices, named_once

T = torch.Tensor
OWN_OPTIONS = ("capturable", "differentiable", "foreach", "fused")
"""Options that say how a step is computed, not what it computes: the optimizer that loads keeps its own."""


def names_of_parameters(on_mesh: ModelOnMesh) -> dict[int, tuple[str, ...]]:
    """id of what an optimizer may step -> names: the model's parameters, and the shards that ZeRO steps instead of them."""
    names = {id(parameter): names for names, parameter in named_once(on_mesh.module)}
    data = data_of(on_mesh.module)
    return names | {id(shard.stepped): names[id(shard.param)] for shard in (data.shards if data is not None else ())}


@dataclass(frozen=True)
class SteppedParameter:
    """A parameter of an optimizer. `group`: index of its parameter group. `name`: in the checkpoint."""

    group: int
    parameter: Any
    name: str
    local: LocalTensor


def parameters_of(on_mesh: ModelOnMesh, optimizer: Optimizer) -> Iterator[SteppedParameter]:
    """All parameters that an optimizer steps. Raises: CheckpointError `foreign-parameter`."""
    names_of, where = names_of_parameters(on_mesh), StoredSlices(on_mesh.module)
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            names = names_of.get(id(parameter))
            if names is None:
                what = f"group {index} of the {type(optimizer).__name__} steps a parameter of shape {list(parameter.shape)}"
                fix = "build the optimizer from the model's parameters, after the model was wrapped"
                raise CheckpointError(Problem("foreign-parameter", what + " that is not the model's", fix=fix))
            name = on_mesh.canonical(names[0])
            local = on_mesh.local_tensor(name, where.of(names, parameter), owner=on_mesh.writes(names[0]))
            yield SteppedParameter(index, parameter, name, local)


def collect(
    on_mesh: ModelOnMesh, optimizer_name: str, optimizer: Optimizer, sink: TensorSink
) -> tuple[list[LocalTensor], dict[str, Any]]:
    """(tensors, this rank's part of the description) of an optimizer's state."""
    tensors: list[LocalTensor] = []
    states: dict[str, Any] = {}
    members: dict[int, list[str]] = {}
    for stepped in parameters_of(on_mesh, optimizer):
        name, local = stepped.name, stepped.local
        members.setdefault(stepped.group, []).append(name)
        state = optimizer.state.get(stepped.parameter)
        if state is None:
            continue
        _check_keys(state, name)
        moments = {key: value for key, value in state.items() if _has_shape_of(stepped.parameter, value)}
        for key, value in moments.items():
            stored = replace(local.stored, local=to_local(value).detach())
            tensors.append(replace(local, name=f"{optimizer_name}/{name}/{key}", stored=stored))
        values = {key: value for key, value in state.items() if key not in moments}
        _check_values(values, name, local, optimizer)
        if local.owner and on_mesh.is_first:
            encoded = {
                key: encode(_on_cpu(value), f"{optimizer_name}.{name}.{key}", sink) for key, value in values.items()
            }
            on_device = [key for key, value in values.items() if isinstance(value, T) and value.device.type != "cpu"]
            states[name] = {"tensors": list(moments), "values": encoded, "on_device": on_device}
    groups = [
        {"options": _options(group, index, sink), "params": members.get(index, [])}
        for index, group in enumerate(optimizer.param_groups)
    ]
    described = describe_optimizer_class(optimizer)
    return tensors, {"class": described, "groups": groups if on_mesh.is_first else [], "state": states}


def _check_keys(state: dict[Any, Any], name: str) -> None:
    not_text = [key for key in state if not isinstance(key, str)]
    if not_text:
        what = f"the optimizer's state of {name} has the key {not_text[0]!r}, which is not a string"
        raise CheckpointError(Problem("unsavable-state", what, fix="use strings as keys of state"))


def _options(group: dict[str, Any], index: int, sink: TensorSink) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: encode(_on_cpu(value), f"optimizer.group {index}.{key}", sink) for key, value in options.items()}


def _on_cpu(value: Any) -> Any:
    return to_local(value).detach().cpu() if isinstance(value, T) else value


def _has_shape_of(parameter: Any, value: Any) -> bool:
    local = to_local(parameter)
    return local.ndim > 0 and isinstance(value, T) and to_local(value).shape == local.shape


def _check_values(values: dict[str, Any], name: str, local: LocalTensor, optimizer: Optimizer) -> None:
    """Raises: CheckpointError `unsavable-state` for state of another shape, of a parameter that is sharded."""
    misshapen = [key for key, value in values.items() if isinstance(value, T) and value.numel() != 1]
    misshapen += [key for key, value in values.items() if isinstance(value, (list, tuple, dict)) and value]
    if misshapen and local.stored.axes:
        what = f"state {short_list(misshapen)} of {name} in the {type(optimizer).__name__} is not shaped like the parameter"
        what += f", which is sharded over {', '.join(sorted(local.stored.axes))}"
        fix = "use zero=0 without tp for this optimizer, or one whose state is shaped like its parameters"
        raise CheckpointError(Problem("unsavable-state", what, fix=fix))


def merge_descriptions(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The description of an optimizer, from the parts of all ranks."""
    groups: list[dict[str, Any]] = []
    states: dict[str, Any] = {}
    for part in parts:
        for index, group in enumerate(part["groups"]):
            same = next((g for g in groups if g["number"] == index and g["options"] == group["options"]), None)
            if same is None:
                same = {"number": index, "options": group["options"], "params": {}}
                groups.append(same)
            same["params"] |= dict.fromkeys(group["params"])
        states |= part["state"]
    with_params = {group["number"] for group in groups if group["params"]}
    # pipeline stages without a parameter of a group may have other options for it, such as defaults
    groups = [group for group in groups if group["params"] or group["number"] not in with_params]
    groups.sort(key=lambda group: group["number"])
    for group in groups:
        group["params"] = list(group["params"])
    return {"class": parts[0]["class"], "groups": groups, "state": states}
