"""Optimisers under ZeRO: the caller's own class, which steps this rank's rows; then everyone gets all rows."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from parallelize.errors import ModelError, Problem
from parallelize.optimizer import ELEMENTWISE, local_optimizer
from parallelize.pipeline.cut import cut_of
from parallelize.sharding import record_of
from parallelize.zero.apply import DataRecord, data_of
from parallelize.zero.shards import Shard, gather_parameters

WHOLE = {
    "Adafactor": "keeps means over the rows and columns of whole matrices",
    "LBFGS": "searches along one vector of all parameters, with dot products over all of them",
    "Muon": "orthogonalises whole matrices",
}
"""Optimisers whose update of an element needs other elements, and why."""


def build_optimizer(
    module: nn.Module,
    optimizer: type[Optimizer],
    params: Iterable[Any] | None = None,
    *,
    elementwise: bool | None = None,
    **options: Any,
) -> Optimizer:
    """An optimiser of any class for a model whose data axes `shard_data` has set up (or that has none).

    It is an instance of that class: schedulers, `param_groups`, `state_dict` and `zero_grad` work as ever. Its state lies
    where the stage says, as DTensors.

    Args:
        params: of the model, or groups of them. Default: all that require a gradient.
        elementwise: True vouches for a class unknown here, whose update of each element needs that element alone.
        options: for the class.

    Raises: ModelError `not-elementwise` for a class that cannot work on parts, with the reason; `foreign-parameter`.
    """
    name = optimizer.__name__
    data = data_of(module)
    local = name in ELEMENTWISE if elementwise is None else elementwise
    if not local:
        _refuse_parts(module, name, data)
    shards = {id(shard.param): shard for shard in data.shards} if data is not None else {}
    groups = list(params) if params is not None else [p for p in module.parameters() if p.requires_grad]
    given = [_mapped(group, module, shards) for group in groups]
    built = optimizer(given, **options)
    if local:
        local_optimizer(built, elementwise=True)
    if any(shard.stepped is not shard.param for shard in shards.values()):
        _around_steps(built, module, shards)
    return built


def _refuse_parts(module: nn.Module, name: str, data: DataRecord | None) -> None:
    """Whole-matrix optimisers work where every rank has whole matrices."""
    if name == "SparseAdam":
        what = "SparseAdam takes sparse gradients, which are not reduced here"
        raise ModelError(Problem("not-elementwise", what, fix="use Adam or AdamW"))
    split = data is not None and data.zero > 0
    record = record_of(module)
    split = split or (record is not None and record.group.size > 1)
    split = split or (name == "LBFGS" and cut_of(module) is not None) or (data is not None and data.masters)
    if split:
        why = WHOLE.get(name, "is not known here")
        what = f"{name} {why}, and this rank holds parts of parameters"
        fix = "use an optimiser that updates each element by itself, or zero=0 without tp"
        if name not in WHOLE:
            fix += "; or pass elementwise=True if it does"
        raise ModelError(Problem("not-elementwise", what, fix=fix))


def _mapped(given: Any, module: nn.Module, shards: dict[int, Shard]) -> Any:
    """A parameter, or a group of them, as what is stepped in its place."""
    if isinstance(given, dict):
        held = given["params"]
        held = [held] if isinstance(held, torch.Tensor) else list(held)
        return {**given, "params": [_mapped(param, module, shards) for param in held]}
    if isinstance(given, (tuple, list)):  # (name, parameter)
        return (given[0], _mapped(given[1], module, shards))
    if shards and id(given) not in shards:
        known = any(given is param for param in module.parameters())
        what = f"a parameter of shape {list(given.shape)} is not one of the model's"
        if not known:
            raise ModelError(Problem("foreign-parameter", what, fix="take parameters after the model was wrapped"))
    shard = shards.get(id(given))
    return given if shard is None else shard.stepped


def _around_steps(built: Optimizer, module: nn.Module, known: dict[int, Shard]) -> None:
    inner_step, inner_zero, inner_add = built.step, built.zero_grad, built.add_param_group
    by_stepped = {id(shard.stepped): shard for shard in known.values()}

    def mine() -> list[Shard]:
        """Of the parameters that this optimiser holds: there may be others beside it."""
        held = [by_stepped.get(id(param)) for group in built.param_groups for param in group["params"]]
        return [shard for shard in held if shard is not None and shard.stepped is not shard.param]

    def step(self: Any, closure: Any = None, **keywords: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shards = mine()
        for shard in shards:
            shard.refresh()
        inner_step(**keywords)
        with torch.no_grad():
            for shard in shards:
                shard.publish()
            gather_parameters(shards)
        return loss

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        inner_zero(set_to_none)
        for shard in mine():
            if set_to_none:
                shard.param.grad = shard.stepped.grad = None
            elif shard.param.grad is not None:
                shard.param.grad.detach().zero_()

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        inner_add(_mapped(param_group, module, known))

    built.add_param_group = MethodType(add_param_group, built)  # type: ignore[method-assign]
    built.step = MethodType(step, built)  # type: ignore[method-assign]
    built.zero_grad = MethodType(zero_grad, built)  # type: ignore[method-assign]
