"""An optimiser's state, by parameter name: what is shaped like its parameter lies where the parameter lies.

shaped like the parameter (moments)        cut as the parameter, whatever the mesh
one element (step counts)                  the same on every rank, kept once
anything else (factored, of all rows)      kept whole where the parameter is whole, refused by name where it is cut
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallelize import _torch_private as private
from parallelize.checkpoint.held import Held, Place
from parallelize.checkpoint.schedulers import describe_optimizer_class
from parallelize.checkpoint.trees import TensorSink, encode
from parallelize.errors import CheckpointError, Problem, short_list
from parallelize.pieces import Places, named_once
from parallelize.zero.apply import data_of

T = torch.Tensor
OWN_WAY = ("capturable", "differentiable", "foreach", "fused")
"""Options that say how a step is computed, not what: the optimiser that loads keeps its own."""


def names_of_parameters(place: Place) -> dict[int, tuple[str, ...]]:
    """id of what an optimiser may hold -> names: the model's parameters, and the rows that ZeRO steps in their place."""
    names = {id(parameter): names for names, parameter in named_once(place.module)}
    data = data_of(place.module)
    return names | {id(shard.stepped): names[id(shard.param)] for shard in (data.shards if data is not None else ())}


def parameters_of(place: Place, optimizer: Optimizer) -> Iterator[tuple[int, Any, str, Held]]:
    """(group, parameter, canonical name, where it lies) of all that an optimiser steps.

    Raises: CheckpointError `foreign-parameter`.
    """
    names, where = names_of_parameters(place), Places(place.module)
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                what = f"group {number} of the {type(optimizer).__name__} steps a parameter of shape {list(parameter.shape)}"
                fix = "build the optimiser from the model's parameters, after the model was wrapped"
                raise CheckpointError(Problem("foreign-parameter", what + " that is not the model's", fix=fix))
            called = names[id(parameter)]
            stored, owner = where.of(called, parameter), place.writes(called[0])
            yield number, parameter, place.canonical(called[0]), place.held(place.canonical(called[0]), stored, owner)


def collect(place: Place, called: str, optimizer: Optimizer, sink: TensorSink) -> tuple[list[Held], dict[str, Any]]:
    """(tensors, this rank's share of the description) of the state of an optimiser that is called so."""
    tensors: list[Held] = []
    params: dict[str, Any] = {}
    members: dict[int, list[str]] = {}
    for number, parameter, name, held in parameters_of(place, optimizer):
        members.setdefault(number, []).append(name)
        state = optimizer.state.get(parameter)
        if state is None:
            continue
        _check_keys(state, name)
        shaped = {key: value for key, value in state.items() if _is_shaped(value, parameter)}
        for key, value in shaped.items():
            stored = replace(held.stored, local=_local(value).detach())
            tensors.append(replace(held, name=f"{called}/{name}/{key}", stored=stored))
        rest = {key: value for key, value in state.items() if key not in shaped}
        _check_rest(rest, name, held, optimizer)
        if held.owner and place.is_first:
            params[name] = {
                "tensors": [str(key) for key in shaped],
                "values": {key: encode(_plain(value), f"{called}.{name}.{key}", sink) for key, value in rest.items()},
                "on_device": [
                    key for key, value in rest.items() if isinstance(value, T) and value.device.type != "cpu"
                ],
            }
    groups = [
        {"options": _options(group, number, sink), "params": members.get(number, [])}
        for number, group in enumerate(optimizer.param_groups)
    ]
    told = place.is_first
    return tensors, {"class": describe_optimizer_class(optimizer), "groups": groups if told else [], "state": params}


def _check_keys(state: dict[Any, Any], name: str) -> None:
    odd = [key for key in state if not isinstance(key, str)]
    if odd:
        what = f"the optimiser's state of {name} has the key {odd[0]!r}, which is no text"
        raise CheckpointError(Problem("unsavable-state", what, fix="name state by text"))


def _options(group: dict[str, Any], number: int, sink: TensorSink) -> dict[str, Any]:
    given = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: encode(_plain(value), f"optimizer.group {number}.{key}", sink) for key, value in given.items()}


def _plain(value: Any) -> Any:
    return _local(value).detach().cpu() if isinstance(value, T) else value


def _local(value: Any) -> T:
    return private.local_of(value) if isinstance(value, DTensor) else value


def _is_shaped(value: Any, parameter: Any) -> bool:
    fits = isinstance(value, T) and _local(value).shape == _local(parameter).shape
    return fits and _local(parameter).ndim > 0


def _check_rest(rest: dict[Any, Any], name: str, held: Held, optimizer: Optimizer) -> None:
    """Raises: CheckpointError `unsavable-state` for what has another shape than a parameter that is cut."""
    odd = [key for key, value in rest.items() if isinstance(value, T) and value.numel() != 1]
    odd += [key for key, value in rest.items() if isinstance(value, (list, tuple, dict)) and value]
    if odd and held.stored.axes:
        what = f"state {short_list(odd)} of {name} in a {type(optimizer).__name__} is not shaped like the parameter"
        what += f", which is cut over {', '.join(sorted(held.stored.axes))}"
        fix = "use zero=0 without tp for this optimiser, or one whose state is shaped like its parameters"
        raise CheckpointError(Problem("unsavable-state", what, fix=fix))


def merged(shares: list[dict[str, Any]]) -> dict[str, Any]:
    """The description of a whole optimiser out of all ranks' shares."""
    groups: list[dict[str, Any]] = []
    params: dict[str, Any] = {}
    for share in shares:
        for number, group in enumerate(share["groups"]):
            same = next((g for g in groups if g["number"] == number and g["options"] == group["options"]), None)
            if same is None:
                same = {"number": number, "options": group["options"], "params": {}}
                groups.append(same)
            same["params"] |= dict.fromkeys(group["params"])
        params |= share["state"]
    held = {group["number"] for group in groups if group["params"]}
    groups = [group for group in groups if group["params"] or group["number"] not in held]
    groups.sort(key=lambda group: group["number"])
    for group in groups:
        group["params"] = list(group["params"])
    return {"class": shares[0]["class"], "groups": groups, "state": params}
