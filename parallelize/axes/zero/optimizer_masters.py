"""The float32 copies that an optimizer steps, in its state dict: without them a save and a load would round the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from parallelize.axes.zero.buckets import to_local
from parallelize.axes.zero.optimizer_shards import OptimizerShard
from parallelize.base.errors import ModelError, Problem

KEY = "masters"
"""Beside "state" and "param_groups": index of a parameter, as "state" counts them -> its float32 copy."""


def save_masters(built: Optimizer, shard_of: Callable[[Any], OptimizerShard | None]) -> None:
    """Let `state_dict()` contain the copies, and `load_state_dict()` set them.

    A state dict without copies, of another optimizer or an older version, leaves them as they are.

    Args:
        built: the optimizer.
        shard_of: the shard that is stepped as this parameter of the optimizer, or None.
    """

    def masters() -> Iterator[tuple[int, OptimizerShard]]:
        parameters = [parameter for group in built.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            shard = shard_of(parameter)
            if shard is not None and shard.has_master:
                yield index, shard

    def add(_: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict[KEY] = {index: shard.stepped.detach() for index, shard in masters()}

    @torch.no_grad()
    def take(_: Optimizer, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get(KEY, {})
        for index, shard in masters():
            if index in saved and saved[index].shape != shard.stepped.shape:
                raise _of_other_shape(shard, saved[index])
        for index, shard in masters():
            if index in saved:
                shard.load_master(to_local(saved[index]))

    built.register_state_dict_post_hook(add)
    built.register_load_state_dict_pre_hook(take)


def _of_other_shape(shard: OptimizerShard, saved: Any) -> ModelError:
    what = f"the float32 copy of {shard.name} is {list(shard.stepped.shape)}, in the state dict {list(saved.shape)}"
    fix = "load it on the mesh and ZeRO stage that saved it; a checkpoint of `Checkpointer` loads on any"
    return ModelError(Problem("master-of-other-shape", what, fix=fix))
