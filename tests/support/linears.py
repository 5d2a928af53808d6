"""The collective matmuls against `F.linear` on one device: every op, on the ranks of the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallelize import all_gather_linear, column_linear, linear_all_reduce, linear_reduce_scatter
from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group

T = torch.Tensor
OPS = ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "column_linear")
FEATURES, OUTS = 6, 10  # uneven over 3 and 4 ranks


class ReferenceLinear:
    """One op on one rank: full tensors, unsharded outputs and gradients, and this rank's shards of them.

    Args:
        op: one of `OPS`.
        shape: of the full input, without features.
        dim: of the tokens.
        weights: how many weights share the input, where the op takes several.
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
        self.expected_grads = [leaf.grad for leaf in leaves]

    @property
    def by_columns(self) -> bool:
        return self.op in ("all_gather_linear", "column_linear")

    def shard(self, x: T, dim: int) -> T:
        start, stop = even_interval(x.shape[dim], self.group.size, self.group.rank)
        return x.narrow(dim, start, stop - start)

    def local_input(self, x: T) -> T:
        return {"all_gather_linear": lambda: self.shard(x, self.dim), "column_linear": lambda: x}.get(
            self.op, lambda: self.shard(x, x.ndim - 1)
        )()

    def local_output(self, out: T) -> T:
        return {"linear_reduce_scatter": lambda: self.shard(out, self.dim), "linear_all_reduce": lambda: out}.get(
            self.op, lambda: self.shard(out, out.ndim - 1)
        )()

    def local_weight(self, weight: T) -> T:
        return self.shard(weight, 0 if self.by_columns else 1)

    def local_bias(self, bias: T) -> T:
        return self.shard(bias, 0) if self.by_columns else bias

    def leaves(self) -> list[T]:
        """This rank's input, weights and biases."""
        local = [self.local_input(self.x), *map(self.local_weight, self.weights), *map(self.local_bias, self.biases)]
        return [t.clone().requires_grad_() for t in local]

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
        torch.autograd.backward(outs, [self.local_output(grad) for grad in self.grads])
        grads = [leaf.grad for leaf in leaves]
        if self.op == "linear_reduce_scatter":  # each rank adds the bias to its own tokens, so the gradients are summed
            dist.all_reduce(grads[-1])
        return [out.detach() for out in outs], grads

    def check(self, outs: list[T], grads: list[T], bound: float = 1e-12) -> None:
        n = len(self.weights)
        expected = [
            self.local_input(self.expected_grads[0]),
            *map(self.local_weight, self.expected_grads[1 : n + 1]),
            *map(self.local_bias, self.expected_grads[n + 1 :]),
        ]
        pairs = [(out, self.local_output(reference.detach())) for out, reference in zip(outs, self.outs, strict=True)]
        for actual, reference in [*pairs, *zip(grads, expected, strict=True)]:
            assert actual.shape == reference.shape, (self.op, actual.shape, reference.shape)
            if actual.numel():
                error = (actual - reference).abs().max() / max(float(reference.abs().max()), 1e-3)
                assert error <= bound, f"{self.op}: {float(error):.1e}"
