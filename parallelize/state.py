"""State dicts in original order, whatever the plan stores; and loading from whole tensors or from DTensors.

`state_dict()` of a model with permuted parameters is a collective over tp: call it on every rank.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelize.errors import Problem, ShapeError
from parallelize.layout import chunked
from parallelize.plan.resolve import ParameterRow
from parallelize.sharding import Record, from_local, require_record, reshard_like, rows_by_name, store, unshard


def install_state_hooks(module: nn.Module) -> None:
    """Make `state_dict` and `load_state_dict` of a planned model, and of its parts, speak the original order."""
    record = require_record(module)
    translator = _Translator(record)
    for name, row in rows_by_name(record).items():
        owner, _, key = name.rpartition(".")
        holder = module.get_submodule(owner)
        holder.__dict__.setdefault("_parallelize_rows", {})[key] = row
        if "_parallelize_translated" not in holder.__dict__:
            holder.__dict__["_parallelize_translated"] = True
            holder.register_state_dict_post_hook(partial(translator.to_original_order))
            holder.register_load_state_dict_pre_hook(partial(translator.to_stored_order))


class _Translator:
    """Between stored and original order, each tied parameter once a state dict."""

    def __init__(self, record: Record):
        self.record = record
        self._dict: Any = lambda: None
        self._done: dict[int, DTensor] = {}

    def __deepcopy__(self, memo: dict) -> _Translator:
        return _Translator(self.record)

    def to_original_order(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace permuted parameters by DTensors in the original order (one gather each, over tp)."""
        for key, row in module.__dict__["_parallelize_rows"].items():
            held = state.get(prefix + key)
            if isinstance(held, DTensor) and not row.layout.is_canonical:
                state[prefix + key] = self._once(
                    state, id(module._parameters[key]), lambda h=held, r=row: self._original(h, r)
                )

    def _once(self, state: Any, key: int, make: Any) -> DTensor:
        if self._dict() is not state:
            self._dict, self._done = weakref.ref(state), {}
        if key not in self._done:
            self._done[key] = make()
        return self._done[key]

    def _original(self, held: DTensor, row: ParameterRow) -> DTensor:
        record = self.record
        full = unshard(held, row.layout, record.group)
        plain = chunked(row.layout.shape, row.layout.dim or 0, record.group.size)
        local = store(full, plain, record.group.rank)
        return from_local(local, plain.shape, Shard(plain.dim or 0), record.tp)

    def to_stored_order(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Turn what is being loaded (whole tensors, or DTensors in original order) into what the parameters store."""
        for key, row in module.__dict__["_parallelize_rows"].items():
            value = state.get(prefix + key)
            if not isinstance(value, torch.Tensor) or (isinstance(value, DTensor) and row.layout.is_canonical):
                continue
            if tuple(value.shape) != row.layout.shape:
                raise ShapeError(
                    Problem(
                        "wrong-shape",
                        f"{prefix + key} is loaded with shape {list(value.shape)}, "
                        f"the model has {list(row.layout.shape)}",
                    )
                )
            parameter = module._parameters[key]
            state[prefix + key] = reshard_like(_whole(value), row.layout, self.record.group, parameter)


def _whole(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
