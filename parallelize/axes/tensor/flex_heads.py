"""`flex_attention` of a rank's heads over `tp`: its functions get the numbers of heads in the unsharded model.

A block mask is the same for all heads, or has blocks for each head, of which those of the rank's heads are built. What
a function reads of every head, such as a slope, is full on each rank, and its gradient is this rank's part of a sum
(`replicate(gradient=partial)`). A function that reads a parameter of which the rank stores its heads, as by the rule
`shard(0)`, gets the numbers of local heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from parallelize.axes.tensor.attention_calls import AttentionCalls
from parallelize.axes.tensor.planned_forward import installed
from parallelize.base.errors import ModelError, Problem
from parallelize.base.layout import Layout
from parallelize.base.torch_private.torch_flex import call_flex_attention, is_flex_attention, uncompiled
from parallelize.ops.attention.flex_masks import (
    Numbers,
    closed_over,
    local_mask,
    renumbered_scores,
    warn_of_local_numbers,
)
from parallelize.state.forward_steps import HEADS, add_step, run_inner

T = torch.Tensor


@dataclass(frozen=True)
class HeadShard:
    """The heads of a rank, by the output features of the widest column linear of a module, which gives queries.

    Attributes:
        start, size: of the first interval of features that the rank computes. full: the features of all ranks in the
            chunk that has it.
        sharded: keys of the module's own parameters of which the rank stores some heads.
    """

    fqn: str
    start: int
    size: int
    full: int
    sharded: tuple[str, ...] = ()

    def numbers(self, heads: int) -> tuple[Numbers, int]:
        """(the numbers of this many local heads, the number of all heads). Raises: ModelError `uneven-heads`."""
        width = self.size // max(1, heads)
        if not width or self.size % heads or self.start % width:
            what = f"{self.fqn} calls flex_attention with {heads} heads of {self.size} features from {self.start} on"
            fix = "shard its projections by heads: `colwise(heads)`"
            raise ModelError(Problem("uneven-heads", what, fix=fix))
        return Numbers(self.start // width), self.full // width


def head_shard(fqn: str, layouts: list[Layout], rank: int, sharded: tuple[str, ...]) -> HeadShard:
    """The heads of a module whose column linears have these layouts."""
    layout = max(layouts, key=lambda each: each.shape[each.dim or 0])
    assert layout.dim is not None
    start, stop = layout.owned[rank][0] if layout.owned[rank] else (0, 0)
    full = layout.chunks[0].size if len(layout.chunks) > 1 else layout.shape[layout.dim]
    return HeadShard(fqn, start, stop - start, full, sharded)


def install_heads(module: nn.Module, shard: HeadShard) -> None:
    """Let `flex_attention` inside of a module's forward get the numbers of its heads."""
    add_step(module, HEADS, _with_numbered_heads, heads=shard)


def _with_numbered_heads(self: Any, *args: Any, **kwargs: Any) -> Any:
    with AttentionCalls(None, partial(_attend, self, self._applied.heads)):
        return run_inner(self, HEADS, args, kwargs)


def _attend(
    module: nn.Module,
    shard: HeadShard,
    query: T,
    key: T,
    value: T,
    score_mod: Any,
    block_mask: Any,
    *options: Any,
) -> Any:
    """The rest of the arguments of `flex_attention`, in its order, after the module and its heads.

    Raises: ModelError `flex-heads`, `uneven-heads`.
    """
    local = query.shape[1]
    numbers, heads = shard.numbers(local)
    if block_mask is not None and block_mask.shape[1] not in (1, local, heads):
        what = (
            f"{shard.fqn} has a block mask of {block_mask.shape[1]} heads, and {heads}, of which this rank has {local}"
        )
        raise ModelError(Problem("flex-heads", what, fix="a block mask of H=None, or of all heads"))
    functions = [score_mod] if block_mask is None else [score_mod, block_mask.mask_mod]
    warn_of_local_numbers(shard.fqn, functions, "heads", local, heads)
    mask = None if block_mask is None else local_mask(block_mask, numbers, block_mask.shape[2], local)
    numbers = Numbers() if _reads_shards(module, shard, score_mod, heads) else numbers
    return call_flex_attention(query, key, value, renumbered_scores(score_mod, numbers), mask, *options)


def _reads_shards(module: nn.Module, shard: HeadShard, score_mod: Any, heads: int) -> bool:
    """Whether a function reads parameters of which this rank stores some heads.

    Raises: ModelError `flex-heads` if it reads a tensor of all heads as well.
    """
    planned = installed(module)
    slots = planned.slots if planned is not None else ()
    leaves = [slot.leaf for slot in slots if slot.key in shard.sharded]
    tensors: list[T] = []
    is_local = False
    for value, names in closed_over(score_mod):
        if isinstance(value, T):
            is_shard = any(leaf is not None and value.data_ptr() == leaf.data_ptr() for leaf in leaves)
            is_local, tensors = is_local or is_shard, [*tensors, value]
        elif value is module:
            is_local = is_local or any(key in names for key in shard.sharded)
    full = [x for x in tensors if heads in x.shape]
    if is_local and full:
        what = f"{shard.fqn}: a score_mod reads {', '.join(shard.sharded)}, of local heads, and {list(full[0].shape)}"
        fix = "the rule `replicate(gradient=partial)` for what it reads of each head"
        raise ModelError(Problem("flex-heads", what, fix=fix))
    return is_local


# -- which modules call it ---------------------------------------------------------------------------------------------


def attention_modules(modules: Mapping[str, nn.Module]) -> list[str]:
    """The modules with the projections of what calls `flex_attention`: the one whose code names it, or the first around
    that one that has parameters."""
    found: dict[str, None] = {}
    for fqn, module in modules.items():
        if calls_flex_attention(module):
            while fqn and next(modules[fqn].parameters(), None) is None:
                fqn = fqn.rpartition(".")[0]
            found.setdefault(fqn)
    return list(found)


def calls_flex_attention(module: nn.Module) -> bool:
    """Whether the code of a module names `flex_attention`, compiled or not."""
    seen: set[Any] = set()
    return any(_names_it(function, module, seen) for function in _functions_of(module))


def _functions_of(module: nn.Module) -> Iterator[FunctionType]:
    for kind in type(module).__mro__:
        if kind is nn.Module or kind.__module__.startswith("torch."):
            return
        yield from (value for value in vars(kind).values() if isinstance(value, FunctionType))


def _names_it(function: FunctionType, module: nn.Module, seen: set[Any]) -> bool:
    if (function, type(module)) in seen:
        return False
    seen.add((function, type(module)))
    for name in _names_in(function.__code__):
        for value in (function.__globals__.get(name), getattr(type(module), name, None), vars(module).get(name)):
            called = uncompiled(value)
            if name == "flex_attention" or is_flex_attention(called):
                return True
            of_models = isinstance(called, FunctionType) and not (called.__module__ or "").startswith("torch")
            if of_models and _names_it(called, module, seen):
                return True
    return False


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
