"""Refuses steps of parameters whose gradients, or whose wider copies, only the optimizers of `build_optimizer` know."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from parallelize.errors import ModelError, Problem

_REFUSED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id, as tensors compare elementwise


def refuse_steps(parameters: Iterable[Any]) -> None:
    """Let a step of an optimizer that has one of these parameters itself raise ModelError `unsharded-optimizer`."""
    for parameter in parameters:
        _REFUSED[id(parameter)] = parameter
        _install()


@lru_cache(maxsize=1)
def _install() -> None:
    """Once in a process: PyTorch calls the hook before the step of any optimizer."""
    register_optimizer_step_pre_hook(_refuse)


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _REFUSED.get(id(parameter)) is parameter:
                name = type(optimizer).__name__
                what = f"{name} was given parameters that are stepped as shards or as float32 copies after shard_data"
                fix = f"build_optimizer(model, {name}, ...), or optimizer() of what parallelize_model returns"
                raise ModelError(Problem("unsharded-optimizer", what, fix=fix))
