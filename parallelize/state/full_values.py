"""Full parameters, gradients and state dicts of a model on any mesh, as the unsharded model has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.plan.models.wrapped_models import AnyModel, module_of
from parallelize.state.later_changes import plan_changes
from parallelize.state.layout_tensor.layout_dtensor import with_layout
from parallelize.state.records import applied
from parallelize.state.stage_values import StageValues, planned_root, stored_like, unsharded


def full_parameter(module: AnyModel, fqn: str, value: Any = None) -> torch.Tensor:
    """A parameter in its original order and shape, on every rank. A collective over the model's mesh.

    With `dtype=` it is the float32 weight that the optimizer steps, as in a checkpoint.

    Args:
        module: a model on any mesh, or any other.
        fqn: the name of the parameter in the unsharded model, whichever stage of a pipeline has it.
        value: a DTensor stored like this rank's parameter (its gradient, an optimizer state) to unshard instead. No
            other stage of a pipeline takes part.

    Returns: a full tensor on the parameter's device. A parameter of this rank that is no DTensor is returned itself.
    Raises: ModelError `unknown-parameter`, `part-of-stages`, `other-parameter` where stages ask for different ones, on
        every rank.
    Cost: one all-gather of the parameter's bytes over each axis that shards it; over `pp` a short message, and one
        broadcast.
    """
    module = module_of(module)
    root = _prepared(module)
    parameter = dict(module.named_parameters(remove_duplicate=False)).get(fqn)
    if value is not None and parameter is not None:
        return unsharded(stored_like(parameter, value))
    local = {} if parameter is None else {fqn: master_weights(root).get(id(parameter), parameter)}
    values = StageValues(module, local, asked=fqn)
    if not values.names:
        what = f"{type(module).__name__} has no parameter {fqn!r}, on any of its ranks"
        raise ModelError(Problem("unknown-parameter", what, fix="a name of the unsharded model's named_parameters()"))
    return next(iter(values))[1]


def full_state_dict(module: AnyModel, *, every_rank: bool = False) -> dict[str, Any]:
    """The full state dict on the CPU, in the original order: what the unsharded model's `load_state_dict` takes.

    A collective over the model's mesh: call it on every rank. Tensors are unsharded one at a time; tied parameters stay
    one tensor. With `dtype=` weights are the float32 ones that the optimizer steps, as in a checkpoint.

    Args:
        module: a model on any mesh, or any other.
        every_rank: return the state dict on every rank. Otherwise only rank 0 returns it.

    Returns: full CPU tensors by name, which training does not change; an empty dict on ranks other than 0 unless
        `every_rank` is set.
    Raises: ModelError `part-of-stages`, on every rank.
    Cost: an all-gather of every sharded tensor's bytes, on every rank, over the axes that shard it; over `pp` a short
        message, and to the stages that return it a broadcast of each tensor.
    """
    module = module_of(module)
    wanted = every_rank or not dist.is_initialized() or dist.get_rank() == 0
    masters = master_weights(_prepared(module))
    state = {name: masters.get(id(value), value) for name, value in module.state_dict(keep_vars=True).items()}
    values = StageValues(module, state, wanted=wanted)
    full: dict[str, Any] = {}
    for names, value in values:
        if wanted:
            full |= dict.fromkeys(names, _copy_to_cpu(value))
    return {name: full[name] for name in values.names} if wanted else {}


def full_gradients(module: AnyModel) -> dict[str, torch.Tensor]:
    """Parameter name -> its full gradient on every rank, for every parameter that has one. Tied parameters have one
    name.

    A collective over the model's mesh: call it on every rank.

    Args:
        module: a model on any mesh, or any other.

    Returns: full gradients by parameter name, in original order, on the parameter's device.
    Raises: ModelError `part-of-stages`, on every rank.
    Cost: one all-gather of every sharded gradient's bytes over each axis that shards it; over `pp` a short message, and
        a broadcast of each gradient.
    """
    module = module_of(module)
    _prepared(module)
    gradients = {name: (parameter, parameter.grad) for name, parameter in module.named_parameters()}
    local = {name: stored_like(*both) for name, both in gradients.items() if both[1] is not None}
    return {names[0]: _copied(value, local.get(names[0])) for names, value in StageValues(module, local)}


def _copied(value: torch.Tensor, stored: Any) -> torch.Tensor:
    """In memory of its own, where nothing had to be gathered."""
    return value.clone() if value is stored else value


def _prepared(module: nn.Module) -> nn.Module:
    """The model in `module`, with its parameters as they are stored, and adapters of a pipeline on the stages that have
    them."""
    _, root = planned_root(module)
    plan_changes(root)
    reshard_units(root)
    return root


def _copy_to_cpu(value: Any) -> Any:
    """In memory of its own, which no step writes to."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


# -- fsdp shards -----------------------------------------------------------------------------------------------------
# Shards that `fully_shard` makes of tensors that are stored by a layout: of the same class, as are their gradients.


def restore_layouts(root: nn.Module, *_: Any) -> None:
    """After `fully_shard`: let its sharded parameters show the layout of the plan, along tp, to PyTorch. No
    communication.

    `fully_shard` makes plain DTensors of them. `shard_data(zero=3)` calls this. After a `fully_shard` of the user it is
    called by the model's next forward, `state_dict()` or `load_state_dict()`.
    """
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            private.convert_sharded(unit, _conversion_of)


def _conversion_of(owner: nn.Module, key: str) -> Callable[[Any], Any] | None:
    row = applied(owner).state_rows.get(key)
    return None if row is None or row.layout.is_canonical else partial(with_layout, layout=row.layout)


def reshard_units(module: nn.Module) -> None:
    """Under `fully_shard`, reshard the parameters that are still gathered after a forward."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def watch_fully_shard(root: nn.Module) -> None:
    """Call `restore_layouts` before forwards and state dicts of a model that has such parameters."""
    if any(not row.layout.is_canonical for module in root.modules() for row in applied(module).state_rows.values()):
        root.register_forward_pre_hook(_Restore())
        root.register_state_dict_pre_hook(restore_layouts)


class _Restore:
    """A pre-forward hook: looks for units of `fully_shard` when the root's class changes, which is what it does to
    it."""

    def __init__(self) -> None:
        self.root_class: type | None = None

    def __call__(self, root: nn.Module, _: Any) -> None:
        if type(root) is not self.root_class:
            self.root_class = type(root)
            restore_layouts(root)


# -- master weights --------------------------------------------------------------------------------------------------
# The wider copies of parameters that an optimizer steps, where a model computes in bfloat16 or float16 (ZeRO 0 to 2).


def master_weights(root: nn.Module) -> dict[int, Any]:
    """id of a parameter -> what an optimizer steps in its place, with what was written to the parameter since its last
    step.

    root: the model that `shard_data` was given. Empty where an optimizer steps the parameters themselves.
    """
    data = applied(root).data
    shards = [shard for shard in data.shards if shard.has_master] if data is not None else []
    for shard in shards:
        shard.follow_edits()
    return {id(shard.param): shard.stepped for shard in shards}
