"""Loading a state dict into a planned model, from full tensors or from DTensors, in the order in which parameters are
stored.

`state_dict()` needs no hook: it has the parameters, whose `full_tensor()` is in the original order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from parallelize.base.errors import Problem, ShapeError
from parallelize.plan.resolved import ParameterRow
from parallelize.state.full_values import watch_fully_shard
from parallelize.state.layout_tensor.layout_dtensor import layout_of
from parallelize.state.records import applied, mark_applied, require_record
from parallelize.state.sharding import reshard_like, rows_by_name


def install_state_hooks(module: nn.Module) -> None:
    """Make `load_state_dict` of a planned model, and of its submodules, take full tensors and DTensors of any
    layout."""
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, row in rows_by_name(require_record(module)).items():
        owner, _, key = name.rpartition(".")
        submodule = modules[owner]
        has_hook = bool(applied(submodule).state_rows)
        mark_applied(submodule, state_rows={**applied(submodule).state_rows, key: row})
        if not has_hook:
            # torch sets an attribute on the hook, which a function shared by modules should not have
            submodule.register_load_state_dict_pre_hook(partial(_to_stored_order))
    watch_fully_shard(module)


def _to_stored_order(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Convert what is loaded to what the parameters store."""
    for key, row in applied(module).state_rows.items():
        value, parameter = state.get(prefix + key), module._parameters.get(key)
        if parameter is None:  # a wrapper, such as that of PEFT's `modules_to_save`, has taken it
            continue
        if not isinstance(value, torch.Tensor) or _is_stored_alike(value, row, parameter):
            continue
        if tuple(value.shape) != row.layout.shape:
            raise ShapeError(
                Problem(
                    "wrong-shape",
                    f"{prefix + key} is loaded with shape {list(value.shape)}, the model has {list(row.layout.shape)}",
                )
            )
        state[prefix + key] = reshard_like(_full_tensor(value), row.layout, parameter)


def _is_stored_alike(value: torch.Tensor, row: ParameterRow, parameter: Any) -> bool:
    """Whether `copy_` takes a value as it is: a DTensor of the same layout."""
    if row.layout.is_canonical or not isinstance(value, DTensor):
        return isinstance(value, DTensor)
    return layout_of(value) == row.layout and value.device_mesh == parameter.device_mesh


def _full_tensor(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
