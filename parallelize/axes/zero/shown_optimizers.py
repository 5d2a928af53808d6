"""Optimizers as `torch.distributed.checkpoint.state_dict` reads and loads them.

PyTorch's `get_optimizer_state_dict` and `set_optimizer_state_dict` look for each parameter of an optimizer among the model's, and
find no shard there. They are shown the model's parameters, with the state of their shards: DTensors, of which each rank writes and
reads its rows. The float32 copies that are stepped are shown as state too, because these functions take nothing else.

A file has the parameter groups of one rank. Over `pp` these name the parameters of one stage, and every stage takes their options.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import nn
from torch.optim import Optimizer

from parallelize.axes.zero.optimizer_masters import KEY as MASTERS
from parallelize.axes.zero.optimizer_shards import OptimizerShard
from parallelize.base.torch_private import torch_state_dicts as private

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
    _show_in_torch()
    _SHARDS[built] = shard_of


@lru_cache(maxsize=1)
def _show_in_torch() -> None:
    private.show_optimizers(_shown, _read)


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
    return {**state_dict, "param_groups": groups}


class _ShownOptimizer:
    """What PyTorch's functions use of an optimizer.

    Attributes:
        param_groups: the optimizer's, with the model's parameters.
        state: the state of each of these.
    """

    def __init__(self, optimizer: Optimizer, shard_of: ShardOf):
        private.start_state(optimizer)
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
        state_dict = private.stock_state_dict(self._optimizer)
        masters = state_dict.pop(MASTERS, {})
        state = {index: dict(values) for index, values in state_dict["state"].items()}
        for index, master in masters.items():
            state.setdefault(index, {})[MASTER] = master
        return {**state_dict, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it into the optimizer, and the copies among it into those of the optimizer."""
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        state = {name: dict(values) for name, values in state_dict["state"].items()}
        masters = {index: state[name].pop(MASTER) for index, name in enumerate(names) if MASTER in state.get(name, {})}
        groups = [
            # PyTorch leaves out the options of a group without parameters, as a stage may have
            {**own, **group}
            for own, group in zip(self.param_groups, state_dict["param_groups"], strict=True)
        ]
        loaded = {**state_dict, "state": state, "param_groups": groups}
        private.load_stock_state_dict(self._optimizer, loaded | ({MASTERS: masters} if masters else {}))

    def step(self, closure: Any = None) -> None:
        """Nothing: the optimizer has its state."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were made for that step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _master(shard: OptimizerShard | None) -> dict[str, Any]:
    return {MASTER: shard.stepped.detach()} if shard is not None and shard.has_master else {}
