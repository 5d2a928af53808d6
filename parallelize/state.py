"""State dicts in original order, whatever the plan stores; and loading from whole tensors or from DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelize.errors import Problem, ShapeError
from parallelize.layout import chunked
from parallelize.sharding import Record, _from_local, record_of, reshard_like, rows_by_name, store, unshard


def install_state_hooks(module: nn.Module) -> None:
    """Make `state_dict` and `load_state_dict` of a planned model speak the original order."""
    module.register_state_dict_post_hook(_to_original_order)
    module.register_load_state_dict_pre_hook(_to_stored_order)


def _to_original_order(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace permuted parameters by DTensors in the original order (one gather each, over tp)."""
    record = record_of(module)
    if record is None:
        return
    done: dict[int, DTensor] = {}
    for name, row in rows_by_name(record).items():
        held = state.get(prefix + name)
        if isinstance(held, DTensor) and not row.layout.is_canonical:
            if id(row) not in done:
                full = unshard(held, row.layout, record.group)
                plain = chunked(row.layout.shape, row.layout.dim or 0, record.group.size)
                local = store(full, plain, record.group.rank)
                done[id(row)] = _from_local(local, plain.shape, Shard(plain.dim or 0), record.tp)
            state[prefix + name] = done[id(row)]


def _to_stored_order(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Turn what is being loaded (whole tensors, or DTensors in original order) into what the parameters store."""
    record = record_of(module)
    if record is None:
        return
    for name, row in rows_by_name(record).items():
        value = state.get(prefix + name)
        if not isinstance(value, torch.Tensor) or (isinstance(value, DTensor) and row.layout.is_canonical):
            continue
        if tuple(value.shape) != row.layout.shape:
            raise ShapeError(
                Problem(
                    "wrong-shape",
                    f"{prefix + name} is loaded with shape {list(value.shape)}, the model has {list(row.layout.shape)}",
                )
            )
        full = _whole(value, record)
        state[prefix + name] = reshard_like(full, row.layout, record.group, module.get_parameter(name))


def _whole(value: torch.Tensor, record: Record) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
