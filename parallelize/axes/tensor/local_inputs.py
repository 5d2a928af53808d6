"""Arguments of a module that have a part for each head, such as ALiBi's biases: each rank takes the parts of its heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.local_widths import read_local_widths
from parallelize.base.errors import Problem, ShapeError
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.plan.styles.contract import InputShard, InputWidth

Call = tuple[tuple, dict]


def local_inputs(
    module: nn.Module,
    shards: tuple[InputShard, ...],
    widths: tuple[InputWidth, ...],
    group: Group,
    argument_of: Callable,
) -> tuple[Callable[[tuple, dict], Call], ...]:
    """For each argument, a function from a call's arguments to those with this rank's part of it, or with a local width.

    argument_of: (module, name) to the position and name of an argument of its forward.
    """
    if group.size == 1:
        return ()
    parts = tuple(
        (argument_of(module, shard.argument), partial(own_part, shard=shard, group=group)) for shard in shards
    )
    return tuple(
        partial(_with_own_part, argument, take)
        for argument, take in (*parts, *read_local_widths(module, widths, argument_of))
    )


def _with_own_part(argument: tuple[int, str], take: Callable[[Any], Any], args: tuple, kwargs: dict) -> Call:
    position, name = argument
    if position < len(args):
        return (*args[:position], take(args[position]), *args[position + 1 :]), kwargs
    return args, ({**kwargs, name: take(kwargs[name])} if name in kwargs else kwargs)


def own_part(value: Any, shard: InputShard, group: Group) -> Any:
    """The heads of this rank, of a tensor whose dim has all heads, once or for each sequence of the batch.

    Anything but a tensor stays, and so does a dim of size 1, which is broadcast over the heads. The gradient is that of all heads.

    Raises: ShapeError `uneven-input`.
    """
    if not isinstance(value, torch.Tensor) or value.ndim <= shard.dim or value.shape[shard.dim] == 1:
        return value
    heads, size = shard.heads, value.shape[shard.dim]
    if size % heads:
        what = f"the input {shard.argument} has {size} entries along dim {shard.dim}, which {heads} heads do not divide"
        rows = (("shape", str(list(value.shape))),)
        raise ShapeError(Problem("uneven-input", what, rows=rows, fix="check the dim under `local_inputs`"))
    if value.requires_grad:
        value = ops.copy(value, group)
    start, stop = shard.owned[group.rank]
    by_head = value.unflatten(shard.dim, (size // heads, heads))
    return by_head.narrow(shard.dim + 1, start, stop - start).flatten(shard.dim, shard.dim + 1)
