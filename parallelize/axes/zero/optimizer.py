"""Optimizers under ZeRO: the caller's class steps this rank's rows, and every rank then gathers all rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.optimizer_shards import OptimizerShard, gather_parameters
from parallelize.axes.zero.reducer import added_error
from parallelize.axes.zero.shard_data import DataRecord, data_of
from parallelize.axes.zero.state_owners import OWNER, remember_owner
from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_state_dicts as state_dicts
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.model_facts import named_once
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.state.full_values import reshard_units
from parallelize.state.later_changes import plan_changes
from parallelize.state.loop import local_optimizer as offloaded_state
from parallelize.state.loop.clip import serve_stock_clip
from parallelize.state.loop.grad_scaler import agree_on_overflow
from parallelize.state.loop.local_optimizer import ELEMENTWISE, local_optimizer
from parallelize.state.optimizers.full_steps import full_steps_of, step_in_full
from parallelize.state.records import inside_adapters, mark_of, mark_parameter, mesh_of, pipeline_cut, record_of

BY_PARAMETER = {"Adafactor", "Muon"}
"""Optimizers whose update of a parameter needs all of it, and nothing of the others."""
NEEDS_ALL_PARAMETERS = {"LBFGS": "searches along one vector of all parameters, with dot products over all of them"}
"""Optimizers whose update needs other parameters, and why."""


def build_optimizer(
    module: AnyModel,
    optimizer: type[Optimizer],
    params: Iterable[Any] | None = None,
    *,
    elementwise: bool | None = None,
    by_parameter: bool | None = None,
    offload_state: bool = False,
    **options: Any,
) -> Optimizer:
    """Build an optimizer of any class for a model after `shard_data`, or for one without data axes.

    It is an instance of that class: schedulers, `param_groups`, `state_dict` and `zero_grad` work as usual. Its state
    is stored as the ZeRO stage says, as DTensors. Where it steps float32 copies of narrower weights, its `state_dict()`
    has them as "masters"; `load_state_dict` raises ModelError `master-of-other-shape` for those of another mesh, and
    `state-of-other-rank` for shards of another rank of the same mesh.

    Args:
        module: the model, after `parallelize_module` and `shard_data`.
        optimizer: the class, such as `torch.optim.AdamW`.
        params: parameters of the model, or groups of them. Default: all that require a gradient.
        elementwise: True says that each element's update needs only that element, for a class that is not known here.
        by_parameter: True says that each parameter's update needs all of that parameter, and nothing of others, for a
            class that is not known here (SOAP, Shampoo, AdamW with states of 8 bits in blocks). Where ranks store
            shards of a parameter, one rank then steps it in full, and has its state.
        offload_state: keep its state in host memory between steps. A step moves that of some parameters at a time to
            their device and back, for a class that updates each element by itself; that of all at once for others.
        options: keyword arguments of the class.

    Returns: the optimizer.
    Raises: ModelError `not-elementwise` for a class that cannot work on shards, with the reason, and for both
        `elementwise` and `by_parameter`; `no-optimizer-class`; `foreign-parameter`; `state-not-offloaded`; those of the
        class; `unmanaged-parameter` for a model that got parameters after `shard_data`.
    Cost: building sends nothing. Under ZeRO 1 and 2 each step ends with an all-gather of the parameters that it has
        stepped. `by_parameter`: building is a collective in which ranks say what they store; a step begins with two
        all-to-alls of shards, values and gradients, to the owners, and ends with one of new values.
    """
    module = module_of(module)
    if isinstance(optimizer, Optimizer):
        what = f"build_optimizer was given an {type(optimizer).__name__} that is built already"
        fix = "the class and its arguments: build_optimizer(model, torch.optim.AdamW, lr=1e-3)"
        raise ModelError(Problem("no-optimizer-class", what, fix=fix))
    name = optimizer.__name__
    whole, module = module, inside_adapters(module)
    data = data_of(module)
    if pipeline_cut(module) is not None:
        plan_changes(module)
    if data is not None and data.zero == 3:
        reshard_units(module)  # a forward without a backward leaves a deferred head gathered
    manage_added(data)
    steps_locally, gathers_itself = _steps_locally(name, elementwise, by_parameter), _gathers_itself(optimizer)
    steps_in_full = not steps_locally and not gathers_itself and _has_shards(module, name, data)
    if not steps_locally and not gathers_itself:
        _refuse_class(name, by_parameter, steps_in_full)
    shards = {id(shard.param): shard for shard in data.shards} if data is not None else {}
    _refuse_added(module, data)
    for shard in shards.values():
        _mark_stepped(shard)
    groups = list(params) if params is not None else [p for p in whole.parameters() if p.requires_grad]
    own = _Own(module, shards, data is not None and data.zero == 3)
    # a pipeline stage may have nothing that trains, such as no adapter
    stepped = [own.stepped(group) for group in groups if not _is_absent(group)] or [{"params": []}]
    built = optimizer(stepped, **options)
    if gathers_itself:
        built.bind_model(module, _names_of_stepped(module, data))  # type: ignore[attr-defined]
    elif steps_locally:
        local_optimizer(built, elementwise=True)
    elif steps_in_full:
        step_in_full(built, module, partial(_names_of_stepped, module, data))
    if offload_state:
        offloaded_state.offload_state(built, by_parameter=steps_locally and not gathers_itself)
    if data is not None and any(shard.stepped is not shard.param for shard in shards.values()):
        _wrap_steps(built, module, data)
    else:
        show_parameters(built, lambda parameter: None)
    mesh = mesh_of(module)
    if mesh is not None:
        agree_on_overflow(built, mesh)
        record = record_of(module)
        folds = record is not None and record.folded is not None
        remember_owner(built, mesh, data.zero if data is not None else 0, folds)
    return built


def manage_added(data: DataRecord | None) -> None:
    """Let the data axes reduce parameters that train only since `shard_data`."""
    if data is not None and data.added_parameters is not None:
        data.added_parameters.manage_added()


def _steps_locally(name: str, elementwise: bool | None, by_parameter: bool | None) -> bool:
    if elementwise and by_parameter:
        what = f"{name} is said to update each element by itself, and to need full parameters"
        raise ModelError(Problem("not-elementwise", what, fix="pass elementwise=True or by_parameter=True, not both"))
    if elementwise and (name in BY_PARAMETER or name in NEEDS_ALL_PARAMETERS):
        what = f"{name} is said to update each element by itself, and needs full parameters"
        raise ModelError(Problem("not-elementwise", what, fix="leave elementwise=True out"))
    return name in ELEMENTWISE and not by_parameter if elementwise is None else elementwise


def _gathers_itself(optimizer: type[Optimizer]) -> bool:
    return bool(getattr(optimizer, "gathers_itself", False))


def _names_of_stepped(module: nn.Module, data: DataRecord | None) -> dict[int, tuple[str, ...]]:
    """id of what an optimizer steps -> the names of the parameter."""
    shards = {id(shard.param): shard for shard in data.shards} if data is not None else {}
    named = named_once(module)
    return {id(shards[id(p)].stepped if id(p) in shards else p): names for names, p in named}


def _mark_stepped(shard: OptimizerShard) -> None:
    """Clipping of what the optimizer steps takes the same norm as clipping of the model."""
    mark = mark_of(shard.param)
    if shard.stepped is not shard.param:
        mark_parameter(shard.stepped, shared=mark.shared, stage=mark.stage)
    if mark.stage is not None:
        serve_stock_clip([shard.stepped])


def _refuse_added(module: nn.Module, data: DataRecord | None) -> None:
    """Gradients of parameters that were added to a data-parallel model would stay on their rank."""
    if data is None or data.engine is None:
        return
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not data.engine.reduces(name, parameter):
            raise added_error(name)


def _has_shards(module: nn.Module, name: str, data: DataRecord | None) -> bool:
    """Whether this rank does not have all of what an optimizer of the unsharded model steps."""
    record = record_of(module)
    return (
        (data is not None and (data.zero > 0 or data.masters))
        or (record is not None and record.group.size > 1)
        or any(_is_sharded(parameter) for parameter in module.parameters())  # experts over data ranks
        or (name in NEEDS_ALL_PARAMETERS and pipeline_cut(module) is not None)
    )


def _refuse_class(name: str, by_parameter: bool | None, has_shards: bool) -> None:
    """Optimizers of which nobody knows what they need, or that need what no rank has, work where every rank has all
    parameters."""
    if name == "SparseAdam":
        what = "SparseAdam takes sparse gradients, which are not reduced here"
        raise ModelError(Problem("not-elementwise", what, fix="use Adam or AdamW"))
    why = NEEDS_ALL_PARAMETERS.get(name)
    if not has_shards or name in BY_PARAMETER or (by_parameter and why is None):
        return
    what = f"{name} {why or 'is not known here'}, and this rank stores shards of parameters"
    fix = "use an optimizer that updates each element, or each parameter, by itself, or zero=0 without tp"
    if why is None:
        fix += (
            "; or pass elementwise=True if it updates each element by itself, by_parameter=True if an update needs "
            "one full parameter"
        )
    raise ModelError(Problem("not-elementwise", what, fix=fix))


def _is_sharded(parameter: Any) -> bool:
    return isinstance(parameter, DTensor) and any(private.shard_dim(p) is not None for p in parameter.placements)


class _Own:
    """The parameters of a model, with what an optimizer steps instead of each.

    Args:
        shards: by id of the parameter. sharded: whether ZeRO 3 shards them: while one is gathered, the module has
            another tensor, which is not stepped.
    """

    def __init__(self, module: nn.Module, shards: dict[int, OptimizerShard], sharded: bool):
        self.shards, self.checks = shards, bool(shards) or sharded
        self.parameters = {id(parameter) for parameter in module.parameters()}

    def stepped(self, item: Any) -> Any:
        """A parameter, a (name, parameter) pair or a group of them, as the optimizer gets it.

        Raises: ModelError `foreign-parameter`.
        """
        if isinstance(item, dict):
            params = item["params"]
            params = [params] if isinstance(params, torch.Tensor) else params
            return {**item, "params": [self.stepped(param) for param in params if not _is_absent(param)]}
        if isinstance(item, (tuple, list)):
            return (item[0], self.stepped(item[1]))
        shard = self.shards.get(id(item))
        if shard is not None:
            return shard.stepped
        if self.checks and id(item) not in self.parameters:
            what = f"a parameter of shape {list(item.shape)} is not one of the model's"
            fix = "take parameters after the model was wrapped, and not between a forward and its backward"
            raise ModelError(Problem("foreign-parameter", what, fix=fix))
        return item


def _is_absent(item: Any) -> bool:
    """Whether a parameter, or a (name, parameter) pair, is of a layer that another pipeline stage has."""
    parameter = item[1] if isinstance(item, (tuple, list)) else item
    return isinstance(parameter, torch.Tensor) and mark_of(parameter).absent


def _wrap_steps(built: Optimizer, module: nn.Module, data: DataRecord) -> None:
    """Around the optimizer's own `step` and `add_param_group`: gradients in, parameters out."""
    inner_step, inner_add = built.step, built.add_param_group
    by_stepped = {id(shard.stepped): shard for shard in data.shards}

    def stepped_shards() -> list[OptimizerShard]:
        """Those of this optimizer: the model may have others."""
        in_groups = [by_stepped.get(id(param)) for group in built.param_groups for param in group["params"]]
        return [shard for shard in in_groups if shard is not None and shard.stepped is not shard.param]

    def step(self: Any, closure: Any = None, **keywords: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own_shards = stepped_shards()
        for shard in own_shards:
            shard.follow_edits()
            shard.begin_step()
        try:
            inner_step(**keywords)
        finally:
            for shard in own_shards:
                shard.end_step()
        with torch.no_grad():
            for shard in own_shards:
                shard.publish()
            gather_parameters(own_shards)
        return loss

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        manage_added(data)
        by_stepped.update((id(shard.stepped), shard) for shard in data.shards)
        shards = {id(shard.param): shard for shard in data.shards}
        inner_add(_Own(module, shards, False).stepped(param_group))

    save_masters(built, lambda parameter: by_stepped.get(id(parameter)))
    show_parameters(built, lambda parameter: by_stepped.get(id(parameter)))
    built.add_param_group = MethodType(add_param_group, built)  # type: ignore[method-assign]
    built.step = MethodType(step, built)  # type: ignore[method-assign]


# -- optimizer masters -----------------------------------------------------------------------------------------------
# The float32 copies that an optimizer steps, in its state dict: without them a save and a load would round the
# weights.


MASTERS = "masters"
"""Beside "state" and "param_groups": index of a parameter, as "state" counts them -> its float32 copy."""


def save_masters(built: Optimizer, shard_of: Callable[[Any], OptimizerShard | None]) -> None:
    """Let `state_dict()` contain the copies, and `load_state_dict()` set them.

    A state dict without copies, of another optimizer or an older version, leaves them as they are.

    Args:
        built: the optimizer.
        shard_of: the shard that is stepped as this parameter of the optimizer, or None.
    """

    def masters() -> Iterator[tuple[int, OptimizerShard]]:
        parameters = [parameter for group in built.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            shard = shard_of(parameter)
            if shard is not None and shard.has_master:
                yield index, shard

    def add(_: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[MASTERS] = {index: shard.stepped.detach() for index, shard in masters()}

    @torch.no_grad()
    def take(_: Optimizer, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get(MASTERS, {})
        for index, shard in masters():
            if index in saved and saved[index].shape != shard.stepped.shape:
                raise _other_shape_error(shard, saved[index])
        for index, shard in masters():
            if index in saved:
                shard.load_master(to_local(saved[index]))

    built.register_state_dict_post_hook(add)
    built.register_load_state_dict_pre_hook(take)


def _other_shape_error(shard: OptimizerShard, saved: Any) -> ModelError:
    what = f"the float32 copy of {shard.name} is {list(shard.stepped.shape)}, in the state dict {list(saved.shape)}"
    fix = "load it on the mesh and ZeRO stage that saved it; a checkpoint of `Checkpointer` loads on any"
    return ModelError(Problem("master-of-other-shape", what, fix=fix))


# -- shown optimizers ------------------------------------------------------------------------------------------------
# Optimizers as `torch.distributed.checkpoint.state_dict` reads and loads them. PyTorch's `get_optimizer_state_dict`
# and `set_optimizer_state_dict` look for each parameter of an optimizer among the model's, and find no shard there.
# They are shown the model's parameters, with the state of their shards: DTensors, of which each rank writes and reads
# its rows. The float32 copies that are stepped are shown as state too, because these functions take nothing else. A
# file has the parameter groups of one rank. Over `pp` these name the parameters of one stage, and every stage takes
# their options.


MASTER = "float32_copy"
"""The key of a parameter's copy in its state."""
ShardOf = Callable[[Any], "OptimizerShard | None"]
_SHARDS: weakref.WeakKeyDictionary[Optimizer, ShardOf] = weakref.WeakKeyDictionary()


def show_parameters(built: Optimizer, shard_of: ShardOf) -> None:
    """Let PyTorch's functions see an optimizer of a model's parameters, also where it steps shards of them.

    Args:
        built: the optimizer.
        shard_of: the shard that is stepped as this parameter of the optimizer, or None.
    """
    state_dicts.show_optimizers(_shown, _read)
    _SHARDS[built] = shard_of


def _shown(model: nn.Module, optimizers: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        _ShownOptimizer(optimizer, _SHARDS[optimizer])
        if isinstance(optimizer, Optimizer) and optimizer in _SHARDS
        else optimizer
        for optimizer in optimizers
    )


def _read(model: nn.Module, shown: tuple[Any, ...], state_dict: Any) -> Any:
    """A state dict whose groups name this rank's parameters, where they are those that the optimizers have."""
    if not state_dict or "param_groups" not in state_dict or not any(isinstance(s, _ShownOptimizer) for s in shown):
        return state_dict
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    own = [[name_of.get(id(p)) for p in group["params"]] for optimizer in shown for group in optimizer.param_groups]
    saved = state_dict["param_groups"]
    group_of = {name: index for index, group in enumerate(saved) for name in group.get("params", ())}
    are_same = len(own) == len(saved) and all(
        name is not None and group_of.get(name, index) == index for index, names in enumerate(own) for name in names
    )
    if not are_same:
        return state_dict
    groups = [{**group, "params": names} for group, names in zip(saved, own, strict=True)]
    count = 0
    for optimizer in shown:
        if isinstance(optimizer, _ShownOptimizer):
            optimizer.first_group = count
        count += len(optimizer.param_groups)
    return {**state_dict, "param_groups": groups}


class _ShownOptimizer:
    """What PyTorch's functions use of an optimizer.

    Attributes:
        param_groups: the optimizer's, with the model's parameters.
        state: the state of each of these.
        first_group: the number of its first group among those of all optimizers that are loaded.
    """

    def __init__(self, optimizer: Optimizer, shard_of: ShardOf):
        full_steps = full_steps_of(optimizer)
        if full_steps is not None:
            full_steps.refuse_every_state(optimizer)
        state_dicts.start_state(optimizer)
        self.first_group = 0
        self._optimizer = optimizer
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Any, dict[str, Any]] = {}
        for group in optimizer.param_groups:
            shards = [(parameter, shard_of(parameter)) for parameter in group["params"]]
            shown = [parameter if shard is None else shard.param for parameter, shard in shards]
            self.param_groups.append({**group, "params": shown})
            for (stepped, shard), parameter in zip(shards, shown, strict=True):
                if stepped in optimizer.state or (shard is not None and shard.has_master):
                    self.state[parameter] = {**optimizer.state.get(stepped, {}), **_master(shard)}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, with the copies among the state."""
        state_dict = state_dicts.stock_state_dict(self._optimizer)
        masters = state_dict.pop(MASTERS, {})
        state_dict.pop(OWNER, None)  # on whatever mesh it is loaded, PyTorch gives each rank its own shards
        state = {index: dict(values) for index, values in state_dict["state"].items()}
        for index, master in masters.items():
            state.setdefault(index, {})[MASTER] = master
        return {**state_dict, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it into the optimizer, and the copies among it into those of the optimizer."""
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        state = {name: dict(values) for name, values in state_dict["state"].items()}
        masters = {index: state[name].pop(MASTER) for index, name in enumerate(names) if MASTER in state.get(name, {})}
        saved = state_dict["param_groups"]
        if len(saved) > len(self.param_groups) and not state:
            # PyTorch gives all groups to each optimizer where this rank has no state, as a stage that trains nothing
            saved = saved[self.first_group : self.first_group + len(self.param_groups)]
        # PyTorch leaves out the options of a group without parameters, as a stage may have
        groups = [{**own, **group} for own, group in zip(self.param_groups, saved, strict=True)]
        loaded = {**state_dict, "state": state, "param_groups": groups}
        state_dicts.load_stock_state_dict(self._optimizer, loaded | ({MASTERS: masters} if masters else {}))

    def step(self, closure: Any = None) -> None:
        """Nothing: the optimizer has its state."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were made for that step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _master(shard: OptimizerShard | None) -> dict[str, Any]:
    return {MASTER: shard.stepped.detach()} if shard is not None and shard.has_master else {}
