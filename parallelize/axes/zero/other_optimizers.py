"""Refuses steps of stock optimizers that would fail half-way, or step something else than the unsharded model's do.

Those of parameters whose gradients, or whose wider copies, only the optimizers of `build_optimizer` know; those of classes whose
update PyTorch cannot run on DTensors; and searches along all parameters, of which a pipeline stage has its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallelize.base.errors import ModelError, Problem
from parallelize.base.patches import active as patches
from parallelize.state.records import mark_of

_REFUSED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id, as tensors compare elementwise


def refuse_steps(parameters: Iterable[Any]) -> None:
    """Let a step of an optimizer that has one of these parameters itself raise ModelError `unsharded-optimizer`."""
    for parameter in parameters:
        _REFUSED[id(parameter)] = parameter
        watch_optimizers()


def watch_optimizers() -> None:
    """Refuse classes that cannot step DTensors, and LBFGS on a pipeline stage, by name before their step."""
    patches.hook("hook before optimizer steps", register_optimizer_step_pre_hook, _refuse)


_FAIL_ON_DTENSORS = {
    "Adafactor": "AdamW, or zero=0 without tp: Adafactor computes means over rows and columns of full matrices",
    "Rprop": "build_optimizer(model, Rprop, ...), or optimizer() of what parallelize_model returns",
}
"""Classes of which an operation is not defined for DTensors (torch 2.13) -> what to use."""

_NOT_FUSED = ("Adagrad", "SGD")
"""Classes whose fused kernels are not defined for DTensors (torch 2.13)."""


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        fused = name in _NOT_FUSED and bool(group.get("fused"))
        if _REFUSED or fused or name in _FAIL_ON_DTENSORS or name == "LBFGS":
            for parameter in group["params"]:
                _refuse_parameter(name, parameter, fused)


def _refuse_parameter(name: str, parameter: Any, fused: bool) -> None:
    if _REFUSED.get(id(parameter)) is parameter:
        what = f"{name} was given parameters that are stepped as shards or as float32 copies after shard_data"
        fix = f"build_optimizer(model, {name}, ...), or optimizer() of what parallelize_model returns"
        raise ModelError(Problem("unsharded-optimizer", what, fix=fix))
    if name in _FAIL_ON_DTENSORS and isinstance(parameter, DTensor):
        what = f"{name} of PyTorch cannot step parameters that are DTensors"
        raise ModelError(Problem("unsharded-optimizer", what, fix=_FAIL_ON_DTENSORS[name]))
    if fused and isinstance(parameter, DTensor):
        what = f"PyTorch has no fused kernel of {name} for parameters that are DTensors"
        fix = f"build_optimizer(model, {name}, fused=True, ...), which steps local tensors; or fused=False"
        raise ModelError(Problem("unsharded-optimizer", what, fix=fix))
    if name == "LBFGS" and mark_of(parameter).stage is not None:
        what = "LBFGS searches along one vector of all parameters, and this rank has those of its pipeline stages"
        raise ModelError(Problem("not-elementwise", what, fix="use AdamW, or a mesh without pp"))
