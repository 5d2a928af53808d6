"""Which dim of a tensor is a shard: what becomes of it where a tensor changes its shape. Arithmetic on shapes, without
tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.base.errors import ModelError, Problem
from parallelize.base.torch_private import torch_tensors as private
from parallelize.state.records import applied

Kind = Literal["sequence", "features"]
Shape = Sequence[int]


@dataclass(frozen=True)
class ShardDim:
    """The sharded dim of a tensor: this rank has a part of it.

    Attributes:
        kind: what is sharded: the tokens of sequences, or the features of a column linear.
        dim: negative, so that it is the same in a tensor that this one is broadcast with.
        outer, size: the dim is [outer, size, rest] flattened, and `size` is the local part.
        source: the name of the module that made the shard.
    """

    kind: Kind
    dim: int
    outer: int
    size: int
    source: str

    def is_whole_dim(self, shape: Shape) -> bool:
        """Whether nothing else is flattened into the dim."""
        return self.outer == 1 and shape[self.dim] == self.size

    def moved(self, dim: int) -> ShardDim:
        return replace(self, dim=dim)

    def without(self, dims: Sequence[int]) -> ShardDim:
        """After other dims, all negative, were removed."""
        return self.moved(self.dim + sum(dim > self.dim for dim in dims))

    def inserted(self, dim: int) -> ShardDim:
        """After a new dim, negative in the larger shape, was inserted."""
        return self.moved(self.dim - 1) if dim >= self.dim else self

    def permuted(self, order: Sequence[int], ndim: int) -> ShardDim:
        """After dim i of the result was taken from dim `order[i]`."""
        return self.moved([dim % ndim for dim in order].index(self.dim % ndim) - ndim)

    def viewed(self, before: Shape, after: Shape) -> ShardDim | None:
        """After a view of the same elements in another shape; None: they no longer have a dim of their own.

        A dim that is split keeps the shard in its first part: a rank with heads [h, d] has some of h and all of d.
        """
        index = len(before) + self.dim
        same = next((i for i in range(index) if i >= len(after) or before[i] != after[i]), index)
        outer = prod(before[:index]) * self.outer
        products = [1, *accumulate(after, mul)]
        if self.kind == "sequence" and self.size == 1:
            return self._viewed_token(index, outer, after, products)
        if not prod(before):
            return None
        own = [dim for dim in range(same, len(after)) if after[dim] == 1 and products[dim] == outer]
        if own and self.size == 1:  # the only head of this rank, after the parts of a packed weight
            return replace(self, dim=own[0] - len(after), outer=1) if len(own) == 1 else None
        if own or (self.size == 1 and same < index):
            return None  # a dim of size 1, which may be the local part of this one
        for dim in range(same, len(after)):
            start, stop = products[dim], products[dim + 1]
            contains = stop >= outer * self.size and stop % (outer * self.size) == 0
            if outer % start == 0 and (contains or (stop > outer and stop % outer == 0)):
                size = self.size if contains else stop // outer
                return replace(self, dim=dim - len(after), outer=outer // start, size=size)
        return None

    def _viewed_token(self, index: int, outer: int, after: Shape, products: Sequence[int]) -> ShardDim | None:
        """One token of each sequence: [batch, 1, hidden] as [batch, hidden] is a batch of tokens, and no hidden dim.

        index: of the dim before. outer: the elements of the dims before it. products: of the sizes before each dim, and
        of all.
        """
        own = [dim for dim, size in enumerate(after) if size == 1 and products[dim] == outer]
        if own:
            dim = index if index in own else own[0]
            return replace(self, dim=dim - len(after), outer=1)
        flat = next((dim for dim in range(len(after)) if products[dim + 1] == outer), None)
        return None if flat is None else replace(self, dim=flat - len(after), outer=outer // products[flat])


def removed(dims: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Dims as negative numbers."""
    return tuple(dim if dim < 0 else dim - ndim for dim in dims)


def broadcasts(shard: ShardDim, before: Shape, after: Shape) -> bool:
    """Whether a result of this shape can be the tensor, broadcast, whose shard dim stayed as it was."""
    if len(after) < len(before) or after[shard.dim] != before[shard.dim]:
        return False
    return all(size in (1, full) for size, full in zip(reversed(before), reversed(after), strict=False))


# -- added parts -----------------------------------------------------------------------------------------------------
# What users add to a planned model, and no plan knows of: adapters, parameters, and hooks that keep a shard.


def refuse_adapters(module: nn.Module, prefix: str, planned_names: Collection[str]) -> None:
    """Refuse a planned module that was wrapped, or replaced, by one that trains.

    Args:
        module: the model, or a part of it whose names begin with `prefix`.
        planned_names: of the modules whose records carry their names.

    Raises: ModelError `added-parameter`.
    """
    modules = dict(module.named_modules())
    planned = {applied(child).name: child for child in modules.values()}
    for path, child in modules.items():
        name = (prefix + path).rstrip(".")
        if name not in planned_names or applied(child).name:
            continue
        is_elsewhere = name in planned and planned[name] not in child.modules()
        added = [key for key, parameter in child.named_parameters() if _trains_unplanned(parameter)]
        if added and not is_elsewhere:
            raise _added_parameter(f"{added[0]} of {name}, which is a {type(child).__name__} now")


def refuse_added(tensors: Iterable[Any], module: str) -> None:
    """Refuse an operation on sequence shards with a parameter that no plan knows; its gradient would be that of some
    tokens.

    Raises: ModelError `added-parameter`.
    """
    if any(map(_trains_unplanned, tensors)):
        raise _added_parameter(f"one of {module}, inside the sequence-parallel region")


def _trains_unplanned(parameter: Any) -> bool:
    return isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor) and parameter.requires_grad


def _added_parameter(which: str) -> ModelError:
    what = (
        f"a parameter was added after the plan, {which}: a rank computes a part of its gradient, and no plan sums the "
        "parts"
    )
    fix = (
        "add it to the model and to the plan before parallelize_module, or merge adapters before it; "
        "or train it without tp, over data axes"
    )
    return ModelError(Problem("added-parameter", what, fix=fix))


class HookedShard(NamedTuple):
    """A shard that a forward hook of the user on the module `name` got as an argument, or made of one."""

    tensor: weakref.ref[torch.Tensor]
    kind: Kind
    name: str


def refuse_kept_shards(hooked_shards: Iterable[HookedShard], output: Any) -> None:
    """Refuse a hook that kept a shard, which code after the forward would take for the full tensor.

    Args:
        output: of the model, which may contain such a tensor.

    Raises: ModelError `kept-shard`.
    """
    returned = {id(leaf) for leaf in private.tree_leaves(output)}
    for reference, kind, name in hooked_shards:
        x = reference()
        if x is None or id(x) in returned or not _is_referred_to(x):
            continue
        part = "tokens of each sequence" if kind == "sequence" else "features"
        what = f"a forward hook on {name} keeps the output, of which a rank has a part: some {part}"
        fix = (
            "hook a module whose output is full on every rank: the block around it, or one outside the "
            "sequence-parallel region"
        )
        raise ModelError(Problem("kept-shard", what, fix=fix))


def _is_referred_to(x: torch.Tensor) -> bool:
    """Whether any object of Python's refers to a tensor, apart from this package's; autograd may keep it alive too."""
    return any(not type(holder).__module__.startswith("parallelize.") for holder in gc.get_referrers(x))
