"""Which dim of a tensor is a shard: what becomes of it where a tensor changes its shape. Arithmetic on shapes, without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from typing import Literal

Kind = Literal["sequence", "features"]
Shape = Sequence[int]


@dataclass(frozen=True)
class ShardDim:
    """The dim of a tensor of which this rank has a part.

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

        index: of the dim before. outer: the elements of the dims before it. products: of the sizes before each dim, and of all.
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
