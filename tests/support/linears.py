"""The collective matmuls against `F.linear` on one device: every op, on whatever ranks run this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallelize import all_gather_linear, column_linear, linear_all_reduce, linear_reduce_scatter
from parallelize.groups import Group
from parallelize.layout import even_interval

T = torch.Tensor
OPS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "column_linear")
FEATURES, OUTS = 6, 10  # uneven over 3 and 4 ranks


class Case:
    """One op on one rank: whole tensors, the unsharded result and gradients, and what this rank should have of them.

    Args:
        op: one of `OPS`. shape: of the whole input but for features. dim: of the rows.
        weights: how many share the input, where the op takes several.
    """

    def __init__(self, op: str, shape: tuple[int, ...], dim: int, weights: int = 1, dtype: torch.dtype = torch.float64):
        self.op, self.dim, self.group = op, dim, Group(dist.group.WORLD)
        random = torch.Generator().manual_seed(len(shape) + dim)
        self.x = torch.randn((*shape, FEATURES), generator=random).to(dtype)
        self.weights = [torch.randn(OUTS, FEATURES, generator=random).to(dtype) for _ in range(weights)]
        self.biases = [torch.randn(OUTS, generator=random).to(dtype) for _ in range(weights)]
        self.grads = [torch.randn((*shape, OUTS), generator=random).to(dtype) for _ in range(weights)]
        leaves = [t.clone().requires_grad_() for t in (self.x, *self.weights, *self.biases)]
        x, rest = leaves[0], leaves[1:]
        self.outs = [F.linear(x, rest[n], rest[weights + n]) for n in range(weights)]
        torch.autograd.backward(self.outs, self.grads)
        self.wanted = [leaf.grad for leaf in leaves]

    @property
    def by_columns(self) -> bool:
        return self.op in ("all_gather_linear", "column_linear")

    def part(self, x: T, dim: int) -> T:
        start, stop = even_interval(x.shape[dim], self.group.size, self.group.rank)
        return x.narrow(dim, start, stop - start)

    def own_input(self, x: T) -> T:
        return {"all_gather_linear": lambda: self.part(x, self.dim), "column_linear": lambda: x}.get(
            self.op, lambda: self.part(x, x.ndim - 1)
        )()

    def own_output(self, out: T) -> T:
        return {"linear_reduce_scatter": lambda: self.part(out, self.dim), "linear_all_reduce": lambda: out}.get(
            self.op, lambda: self.part(out, out.ndim - 1)
        )()

    def own_weight(self, weight: T) -> T:
        return self.part(weight, 0 if self.by_columns else 1)

    def own_bias(self, bias: T) -> T:
        return self.part(bias, 0) if self.by_columns else bias

    def leaves(self) -> list[T]:
        """This rank's input, weights and biases."""
        own = [self.own_input(self.x), *map(self.own_weight, self.weights), *map(self.own_bias, self.biases)]
        return [t.clone().requires_grad_() for t in own]

    def call(self, leaves: list[T], **options: Any) -> list[T]:
        n = len(self.weights)
        x, weights, biases = leaves[0], leaves[1 : n + 1], leaves[n + 1 :]
        if self.op == "all_gather_linear":
            full = self.x.shape[self.dim]
            return all_gather_linear(x, weights, biases, dim=self.dim, group=self.group, full=full, **options)
        if self.op == "column_linear":
            return column_linear(x, weights, biases, group=self.group, **options)
        if self.op == "linear_reduce_scatter":
            return [linear_reduce_scatter(x, weights[0], biases[0], dim=self.dim, group=self.group, **options)]
        return [linear_all_reduce(x, weights[0], biases[0], group=self.group, **options)]

    def run(self, call: Callable[..., list[T]] | None = None, **options: Any) -> tuple[list[T], list[T]]:
        """(outputs, gradients) of this rank."""
        leaves = self.leaves()
        outs = (call or self.call)(leaves, **options)
        torch.autograd.backward(outs, [self.own_output(grad) for grad in self.grads])
        grads = [leaf.grad for leaf in leaves]
        if self.op == "linear_reduce_scatter":  # each rank adds the bias to its own rows: the parts make the sum
            dist.all_reduce(grads[-1])
        return [out.detach() for out in outs], grads

    def check(self, outs: list[T], grads: list[T], bound: float = 1e-12) -> None:
        n = len(self.weights)
        wanted = [
            self.own_input(self.wanted[0]),
            *map(self.own_weight, self.wanted[1 : n + 1]),
            *map(self.own_bias, self.wanted[n + 1 :]),
        ]
        pairs = [(out, self.own_output(want.detach())) for out, want in zip(outs, self.outs, strict=True)]
        for got, want in [*pairs, *zip(grads, wanted, strict=True)]:
            assert got.shape == want.shape, (self.op, got.shape, want.shape)
            if got.numel():
                error = (got - want).abs().max() / max(float(want.abs().max()), 1e-3)
                assert error <= bound, f"{self.op}: {float(error):.1e}"
