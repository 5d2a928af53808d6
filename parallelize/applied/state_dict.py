"""State dicts in the original order of elements, whatever order the plan stores; loading from full tensors or DTensors.

`state_dict()` of a model with permuted parameters is a collective over tp: call it on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelize.applied.records import applied, mark_applied, require_record
from parallelize.applied.sharding import PlanRecord, from_local, reshard_like, rows_by_name, store, unshard
from parallelize.errors import Problem, ShapeError
from parallelize.layout import chunked
from parallelize.plan.rows import ParameterRow


def install_state_hooks(module: nn.Module) -> None:
    """Make `state_dict` and `load_state_dict` of a planned model, and of its submodules, use the original order."""
    record = require_record(module)
    translator = _Translator(record)
    for name, row in rows_by_name(record).items():
        owner, _, key = name.rpartition(".")
        submodule = module.get_submodule(owner)
        has_hooks = bool(applied(submodule).state_rows)
        mark_applied(submodule, state_rows={**applied(submodule).state_rows, key: row})
        if not has_hooks:
            # torch sets an attribute on the hook, which a bound method does not accept
            submodule.register_state_dict_post_hook(partial(translator.to_original_order))
            submodule.register_load_state_dict_pre_hook(partial(translator.to_stored_order))


class _Translator:
    """Converts between stored and original order; a tied parameter is converted once for each state dict."""

    def __init__(self, record: PlanRecord):
        self.record = record
        self._state_ref: Callable[[], Any] = lambda: None  # the state dict that `_converted` belongs to
        self._converted: dict[int, DTensor] = {}  # by id of the stored parameter

    def __deepcopy__(self, memo: dict) -> _Translator:
        return _Translator(self.record)

    def to_original_order(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace permuted parameters by DTensors in the original order (one gather each, over tp)."""
        for key, row in applied(module).state_rows.items():
            stored = state.get(prefix + key)
            if isinstance(stored, DTensor) and not row.layout.is_canonical:
                if self._state_ref() is not state:
                    self._state_ref, self._converted = weakref.ref(state), {}
                parameter_id = id(module._parameters[key])
                if parameter_id not in self._converted:
                    self._converted[parameter_id] = self._original(stored, row)
                state[prefix + key] = self._converted[parameter_id]

    def _original(self, stored: DTensor, row: ParameterRow) -> DTensor:
        record = self.record
        full = unshard(stored, row.layout, record.group)
        canonical = chunked(row.layout.shape, row.layout.dim or 0, record.group.size)
        local = store(full, canonical, record.group.rank)
        return from_local(local, canonical.shape, Shard(canonical.dim or 0), record.tp)

    def to_stored_order(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Convert what is loaded, full tensors or DTensors in the original order, to what the parameters store."""
        for key, row in applied(module).state_rows.items():
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
            state[prefix + key] = reshard_like(_full_tensor(value), row.layout, self.record.group, parameter)


def _full_tensor(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
