"""An optimizer's state by parameter name. State of a parameter's shape is laid out as the parameter.

shaped like the parameter (moments)        sharded as the parameter, on any mesh
one element (step counts)                  the same on every rank, saved once
anything else (factored moments)           saved in full where the parameter is not sharded, refused by name where it is

Where one rank steps a sharded parameter in full (`state/optimizers/full_steps.py`), that rank has all of its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from parallelize.axes.zero.buckets import as_gradient, to_local
from parallelize.axes.zero.shard_data import data_of
from parallelize.base.errors import CheckpointError, Problem, did_you_mean, short_list
from parallelize.base.layout import replicated
from parallelize.checkpoint.format.device_pieces import torch_dtype
from parallelize.checkpoint.format.json_codec import TensorSink, decode, encode
from parallelize.checkpoint.format.manifest import SavedTensor
from parallelize.checkpoint.format.resized_vocabulary import ResizedVocabulary
from parallelize.checkpoint.run.fill_tensors import Files, ReadJob, allocate_local, jobs_for, read_full
from parallelize.checkpoint.run.local_tensors import LocalTensor, ModelOnMesh
from parallelize.checkpoint.run.run_state import describe_optimizer_class
from parallelize.plan.model_facts import named_once
from parallelize.state.optimizers.full_steps import full_steps_of
from parallelize.state.stored_slices import StoredSlices, StoredTensor

T = torch.Tensor
OWN_OPTIONS = ("capturable", "differentiable", "foreach", "fused")
"""Options that say how a step is computed, not what it computes: the optimizer that loads keeps its own."""


def names_of_parameters(on_mesh: ModelOnMesh) -> dict[int, tuple[str, ...]]:
    """id of what an optimizer may step -> names: the model's parameters, and the shards that ZeRO steps instead of
    them."""
    names = {id(parameter): names for names, parameter in named_once(on_mesh.module)}
    data = data_of(on_mesh.module)
    return names | {id(shard.stepped): names[id(shard.param)] for shard in (data.shards if data is not None else ())}


@dataclass(frozen=True)
class SteppedParameter:
    """A parameter of an optimizer.

    Attributes:
        group: index of its parameter group. local: its state of the parameter's shape, as this rank stores it.
        describes: whether this rank says what the state is.
        owned: whether this rank has all of its state, or another one; None: each has that of what it stores.
    """

    group: int
    parameter: Any
    local: LocalTensor
    describes: bool
    owned: bool | None = None

    def has_shape_of(self, value: Any) -> bool:
        """Whether an entry of the state is laid out as the parameter."""
        local = self.local.stored.local
        return local.ndim > 0 and isinstance(value, T) and to_local(value).shape == local.shape

    def as_state(self, local: T) -> T:
        """An entry of the state that is laid out as the parameter."""
        local = local.to(self.parameter.device)
        return as_gradient(self.parameter, local) if self.owned is None else local


def parameters_of(on_mesh: ModelOnMesh, optimizer: Optimizer) -> Iterator[SteppedParameter]:
    """All parameters that an optimizer steps. Raises: CheckpointError `foreign-parameter`."""
    names_of, where = names_of_parameters(on_mesh), StoredSlices(on_mesh.module)
    full_steps = full_steps_of(optimizer)
    if full_steps is not None:
        full_steps.bind(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            names = names_of.get(id(parameter))
            if names is None:
                what = (
                    f"group {index} of the {type(optimizer).__name__} steps a parameter of shape "
                    f"{list(parameter.shape)}"
                )
                fix = "build the optimizer from the model's parameters, after the model was wrapped"
                raise CheckpointError(Problem("foreign-parameter", what + " that is not the model's", fix=fix))
            name, stored = on_mesh.canonical(names[0]), where.of(names, parameter)
            local = on_mesh.local_tensor(name, stored, owner=on_mesh.writes(names[0]))
            owned = full_steps.is_owner(parameter) if full_steps is not None else None
            if owned is not None:
                local = LocalTensor(name, _whole(stored), owner=local.owner)
            yield SteppedParameter(index, parameter, local, local.owner and (owned or on_mesh.is_first), owned)


def _whole(stored: StoredTensor) -> StoredTensor:
    """All of a parameter, as its owner has it in a step."""
    like = stored.local.new_empty(stored.shape, device="meta")
    return StoredTensor(stored.fqn, stored.names, like, stored.shape, replicated(stored.shape, 1).slices(0))


def collect(
    on_mesh: ModelOnMesh, optimizer_name: str, optimizer: Optimizer, sink: TensorSink
) -> tuple[list[LocalTensor], dict[str, Any]]:
    """(tensors, this rank's part of the description) of an optimizer's state."""
    tensors: list[LocalTensor] = []
    states: dict[str, Any] = {}
    members: dict[int, list[str]] = {}
    for stepped in parameters_of(on_mesh, optimizer):
        local = stepped.local
        name = local.name
        members.setdefault(stepped.group, []).append(name)
        state = optimizer.state.get(stepped.parameter)
        if state is None or stepped.owned is False:
            continue
        _check_keys(state, name)
        moments = {key: value for key, value in state.items() if stepped.has_shape_of(value)}
        for key, value in moments.items():
            stored = replace(local.stored, local=to_local(value).detach())
            tensors.append(replace(local, name=f"{optimizer_name}/{name}/{key}", stored=stored))
        values = {key: value for key, value in state.items() if key not in moments}
        _check_values(values, name, local, optimizer)
        if stepped.describes:
            encoded = {
                key: encode(_copy_to_cpu(value), f"{optimizer_name}.{name}.{key}", sink)
                for key, value in values.items()
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
    return {key: encode(_copy_to_cpu(value), f"optimizer.group {index}.{key}", sink) for key, value in options.items()}


def _copy_to_cpu(value: Any) -> Any:
    return to_local(value).detach().cpu() if isinstance(value, T) else value


def _check_values(values: dict[str, Any], name: str, local: LocalTensor, optimizer: Optimizer) -> None:
    """Raises: CheckpointError `unsavable-state` for state of another shape, of a parameter that is sharded."""
    misshapen = [key for key, value in values.items() if isinstance(value, T) and value.numel() != 1]
    misshapen += [key for key, value in values.items() if isinstance(value, (list, tuple, dict)) and value]
    if misshapen and local.stored.axes:
        what = (
            f"state {short_list(misshapen)} of {name} in the {type(optimizer).__name__} is not shaped like the "
            "parameter"
        )
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


# -- optimizer restore -----------------------------------------------------------------------------------------------
# An optimizer's state from a checkpoint: matched by parameter name, read, and set when everything is right.


@dataclass
class RestoredOptimizer:
    """New state for an optimizer.

    Attributes:
        parameters: the parameters whose state is replaced.
        moments: (parameter, key, its tensor). values: (parameter, key, value, whether it was on an accelerator).
        options: the options of each parameter group.
    """

    optimizer: Optimizer
    parameters: list[Any] = field(default_factory=list)
    moments: list[tuple[SteppedParameter, str, T]] = field(default_factory=list)
    values: list[tuple[Any, str, Any, bool]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)

    def apply(self) -> None:
        """Set the state and the groups' options."""
        for parameter in self.parameters:
            self.optimizer.state.pop(parameter, None)
        for stepped, key, local in self.moments:
            self.optimizer.state[stepped.parameter][key] = stepped.as_state(local)
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for parameter, key, value, was_on_device in self.values:
            group = groups[id(parameter)]
            if isinstance(value, T):
                on_device = was_on_device or (key == "step" and (group.get("capturable") or group.get("fused")))
                value = value.to(parameter.device if on_device else "cpu")
            self.optimizer.state[parameter][key] = value
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            group.update({key: value for key, value in options.items() if key not in OWN_OPTIONS})
        local_steps: Any = getattr(self.optimizer, "_local_steps", None)
        if local_steps is not None:
            local_steps.forget()


def plan_optimizer(
    on_mesh: ModelOnMesh,
    name: str,
    optimizer: Optimizer,
    description: dict[str, Any],
    files: Files,
    *,
    strict: bool,
    resized: ResizedVocabulary | None = None,
) -> tuple[RestoredOptimizer, list[ReadJob]]:
    """(what to set, what to read for it). Nothing is changed. resized: how the vocabulary may differ.

    Raises: CheckpointError `other-optimizer`, `missing-parameter`, `wrong-shape`, `groups-differ`, `missing-tensor`,
        `unsavable-state`.
    """
    _check_class(optimizer, description)
    plan = _Plan(RestoredOptimizer(optimizer), name, files, resized)
    group_of = {name: index for index, group in enumerate(description["groups"]) for name in group["params"]}
    saved_groups: dict[int, set[int]] = {}  # group of the optimizer -> saved groups that its parameters were in
    unsaved = []
    for stepped in parameters_of(on_mesh, optimizer):
        if stepped.local.name not in group_of:
            unsaved.append(stepped.local.name)
            continue
        saved_groups.setdefault(stepped.group, set()).add(group_of[stepped.local.name])
        plan.add(stepped, description["state"].get(stepped.local.name))
    if unsaved and strict:
        what = f"the {type(optimizer).__name__} steps parameters that the saved one did not: {short_list(unsaved, 4)}"
        raise CheckpointError(Problem("missing-parameter", what, fix=did_you_mean(unsaved[0], group_of)))
    _refuse_divided(optimizer, saved_groups)
    plan.restored.options = _restored_options(optimizer, description, saved_groups, files)
    return plan.restored, plan.jobs


def _check_class(optimizer: Optimizer, description: dict[str, Any]) -> None:
    name = type(optimizer).__qualname__
    if description["class"].get("name") != name:
        what = f"the saved state is of class {description['class'].get('name')}, the optimizer is of class {name}"
        fix = "build the same class, or load without an optimizer"
        raise CheckpointError(Problem("other-optimizer", what, fix=fix))


class _Plan:
    """What to read for an optimizer's state, collected parameter by parameter."""

    def __init__(self, restored: RestoredOptimizer, name: str, files: Files, resized: ResizedVocabulary | None):
        self.restored, self.name, self.files, self.resized = restored, name, files, resized
        self.jobs: list[ReadJob] = []

    def add(self, stepped: SteppedParameter, saved: dict[str, Any] | None) -> None:
        """A parameter of the saved optimizer. `saved`: the description of its state, if it had any."""
        self.restored.parameters.append(stepped.parameter)
        if saved is None or stepped.owned is False:
            return
        for key in saved["tensors"]:
            self._add_moment(stepped, key)
        for key, value in saved["values"].items():
            self._add_value(stepped, key, value, key in saved["on_device"])

    def _add_moment(self, stepped: SteppedParameter, key: str) -> None:
        tensors, where = self.files.manifest.tensors, str(self.files.folder)
        full_name = f"{self.name}/{stepped.local.name}/{key}"
        saved, stored = tensors.get(full_name), stepped.local.stored
        if saved is None:
            raise CheckpointError(Problem("missing-tensor", f"no tensor {full_name!r} was saved", where))
        is_resized = self.resized is not None and self.resized.explains(saved.shape, stored.shape)
        if saved.shape != stored.shape and not is_resized:
            what = (
                f"{key} of {stepped.local.name} was saved as {list(saved.shape)}, the parameter is {list(stored.shape)}"
            )
            raise CheckpointError(Problem("wrong-shape", what, where))
        dtype = _dtype_of_moment(saved, tensors.get(f"model/{stepped.local.name}"), stepped.parameter)
        current = None if is_resized else _current_moment(self.restored.optimizer, stepped, key, dtype)
        local = allocate_local(stored, dtype, self.files.arena) if current is None else current
        if is_resized:  # tokens that the checkpoint does not have
            local.zero_()
        self.restored.moments.append((stepped, key, local))
        self.jobs += jobs_for(self.files, saved, stored, local, hidden=current is None)

    def _add_value(self, stepped: SteppedParameter, key: str, encoded: Any, on_device: bool) -> None:
        value = decode(encoded, lambda where: read_full(self.files, where), f"{self.name}.{stepped.local.name}.{key}")
        axes = sorted(stepped.local.stored.axes)
        if isinstance(value, T) and value.numel() != 1 and self._is_resized(stepped.local):
            assert self.resized is not None
            value = self.resized.resized(value)
        if isinstance(value, T) and value.numel() != 1 and axes:
            shape, over = list(value.shape), ", ".join(axes)
            what = f"{key} of {stepped.local.name} is {shape}, and the parameter is sharded over {over}"
            raise CheckpointError(Problem("unsavable-state", what, fix="load it where the parameter is not sharded"))
        self.restored.values.append((stepped.parameter, key, value, on_device))

    def _is_resized(self, local: LocalTensor) -> bool:
        weight = self.files.manifest.tensors.get(f"model/{local.name}")
        return bool(weight and self.resized and self.resized.explains(weight.shape, local.stored.shape))


def _dtype_of_moment(saved: SavedTensor, weight: SavedTensor | None, parameter: Any) -> torch.dtype:
    """A moment that had its parameter's dtype gets the new parameter's dtype; another keeps its own."""
    follows = weight is not None and weight.dtype == saved.dtype and parameter.is_floating_point()
    return parameter.dtype if follows else torch_dtype(saved.dtype)


def _current_moment(optimizer: Optimizer, stepped: SteppedParameter, key: str, dtype: torch.dtype) -> T | None:
    """The optimizer's own local tensor of this state, if the saved values can be read into it."""
    current = to_local(optimizer.state.get(stepped.parameter, {}).get(key))
    device = to_local(stepped.parameter).device
    fits = stepped.has_shape_of(current) and (current.dtype, current.device) == (dtype, device)
    return current if fits else None


def _refuse_divided(optimizer: Optimizer, saved_groups: dict[int, set[int]]) -> None:
    """Refuse groups with options of their own whose parameters were in one group: it has one value of each option."""
    groups_of: dict[int, list[int]] = {}
    for number, saved in sorted(saved_groups.items()):
        for index in saved:
            groups_of.setdefault(index, []).append(number)
    for index, numbers in groups_of.items():
        first, *other_groups = [optimizer.param_groups[number] for number in numbers]
        for number, group in zip(numbers[1:], other_groups, strict=True):
            differing = [
                key for key in first if key not in (*OWN_OPTIONS, "params") and _differ(first[key], group.get(key))
            ]
            if differing:
                what = (
                    f"groups {numbers[0]} and {number} differ in {short_list(differing, 4)}, and their parameters "
                    "were saved in "
                    f"one group, {index}"
                )
                fix = "build the optimizer with the groups it was saved with, resume, and set the options afterwards"
                raise CheckpointError(Problem("groups-differ", what, fix=fix))


def _differ(value: Any, other: Any) -> bool:
    return repr(value) != repr(other)


def _restored_options(
    optimizer: Optimizer, description: dict[str, Any], saved_groups: dict[int, set[int]], files: Files
) -> list[dict[str, Any]]:
    """The options of each group of the optimizer: those of the saved group that its parameters were in."""
    decoded: list[dict[str, Any]] = []
    for number in range(len(optimizer.param_groups)):
        candidates = [description["groups"][index]["options"] for index in sorted(saved_groups.get(number, ()))]
        if any(options != candidates[0] for options in candidates):
            what = f"group {number} joins parameters of {len(candidates)} saved groups with different options"
            fix = "build the optimizer with the groups it was saved with"
            raise CheckpointError(Problem("groups-differ", what, fix=fix))
        if not candidates:  # a pipeline stage may have none of a group's parameters
            candidates = [group["options"] for group in description["groups"] if group["number"] == number]
        options = candidates[0] if candidates else {}
        decoded.append(
            {
                key: decode(value, lambda where: read_full(files, where), f"group {number}.{key}")
                for key, value in options.items()
            }
        )
    return decoded
