"""Refuses methods of a stock model that read or replace full parameters, once it stores shards of them, or sums their gradients.

They would fail in the words of DTensors, or write the shards of one rank as if they were the model. Parameters that replace others
after `shard_data` would be trained by each rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.state.records import applied, pipeline_cut

_FIXES = {
    "save_pretrained": "parallelize.save_pretrained(model, folder) on every rank; or model.save_pretrained(folder, "
    "state_dict=state) on rank 0, after state = full_state_dict(model) on every rank",
    "resize_token_embeddings": "resize before the plan is applied",
}
# adapters that are added are planned, and given to the reduction over data axes, before the next forward: `axes/tensor/install/added_adapters.py`


def guard_stock_methods(module: nn.Module) -> None:
    """Let these methods of a planned model, and of its submodules, raise ModelError `reads-full-parameters`."""
    for owner in module.modules():
        for name in _GUARDS:
            if callable(getattr(type(owner), name, None)):
                owner.__dict__.setdefault(name, MethodType(_GUARDS[name], owner))


def guard_replacing_methods(module: nn.Module) -> None:
    """Let those of them that replace parameters raise ModelError `replaces-parameters`, for a model whose gradients are summed."""
    for owner in module.modules():
        for name in _REFUSALS:
            if callable(getattr(type(owner), name, None)):
                owner.__dict__.setdefault(name, MethodType(_REFUSALS[name], owner))


def _refusal(name: str) -> Callable[..., Any]:
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        what = f"{type(self).__name__}.{name} replaces parameters whose gradients are summed over the data axes"
        fix = _FIXES[name].replace("before the plan is applied", "before shard_data or parallelize_model")
        raise ModelError(Problem("replaces-parameters", what, fix=fix))

    return refused


def _guard(name: str) -> Callable[..., Any]:
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = kwargs.get("state_dict")
        is_full = isinstance(state, Mapping) and not any(isinstance(value, DTensor) for value in state.values())
        stored = "" if name == "save_pretrained" and is_full else _stored_here(self)
        if stored:
            what = f"{type(self).__name__}.{name} needs full parameters, and this rank stores {stored}"
            raise ModelError(Problem("reads-full-parameters", what, fix=_FIXES[name]))
        return getattr(type(self), name)(self, *args, **kwargs)

    return guarded


def _stored_here(model: nn.Module) -> str:
    """What a rank stores of a model, where that is not all of it."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return "shards of them"
    is_cut = pipeline_cut(model) is not None or any(applied(inner).absent for inner in model.modules())
    return "those of its pipeline stages" if is_cut else ""


def guarded_method(name: str) -> Callable[..., Any]:
    """What raises ModelError `reads-full-parameters` where a model stores shards, and calls the stock method where it does not."""
    return _GUARDS[name]


_GUARDS = {name: _guard(name) for name in _FIXES}
_REFUSALS = {name: _refusal(name) for name in _FIXES if name != "save_pretrained"}
