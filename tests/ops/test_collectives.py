"""The differentiable collectives: by hand, by gradcheck over all ranks at once, uneven shards, one rank, unchanged
inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallelize.base.layout import even_interval
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from tests.support.threads import run_ranks

T = torch.Tensor


def world() -> Group:
    return Group(dist.group.WORLD)


# -- by hand: X = [[1], [2], (3)], one weight, a mean ------------------------------------------------------------------


def local_rows(rows: int, group: Group) -> T:
    start, stop = even_interval(rows, group.size, group.rank)
    return torch.arange(1.0, rows + 1).view(-1, 1)[start:stop].clone().requires_grad_()


@pytest.mark.parametrize(("rows", "shards"), [(2, [1, 1]), (3, [2, 1])])
def test_gather_whose_gradient_is_a_partial_sum(rows, shards):
    """Each rank multiplies all rows by its local weight, 3 or 5. Loss: the mean of rows x 2 values.

    d loss / d x = (3 + 5) / (2 rows); d loss / d w = sum of x / (2 rows).
    """

    def body(rank: int) -> tuple[T, T, T]:
        group = world()
        x, weight = local_rows(rows, group), torch.tensor([[3.0, 5.0][rank]], requires_grad=True)
        outputs = ops.gather(x, group, 0, rows, "partial") * weight
        (outputs.sum() / (2 * rows)).backward()
        return outputs.detach(), x.grad, weight.grad

    for rank, (outputs, grad, weight_grad) in enumerate(run_ranks(2, body)):
        assert outputs.flatten().tolist() == [[3.0, 5.0][rank] * row for row in range(1, rows + 1)]
        assert grad.flatten().tolist() == pytest.approx([8 / (2 * rows)] * shards[rank])
        assert weight_grad.item() == sum(range(1, rows + 1)) / (2 * rows)


@pytest.mark.parametrize(("rows", "shards"), [(2, [1, 1]), (3, [2, 1])])
def test_gather_whose_gradient_is_replicated(rows, shards):
    """Each rank multiplies all rows by the same weight 3 and has the same loss, their mean: d loss / d x = 3 / rows."""

    def body(rank: int) -> T:
        group = world()
        x = local_rows(rows, group)
        (ops.gather(x, group, 0, rows, "replicate") * 3.0).mean().backward()
        return x.grad

    for rank, grad in enumerate(run_ranks(2, body)):
        assert grad.flatten().tolist() == pytest.approx([3 / rows] * shards[rank])


@pytest.mark.parametrize(("rows", "shards"), [(2, [1, 1]), (3, [2, 1])])
def test_reduce_scatter(rows, shards):
    """Rank r has x times (3, 5)[r]; the sum is 8 x, of which each rank gets its rows. Loss: the mean over all rows."""

    def body(rank: int) -> tuple[T, T]:
        group = world()
        part = (torch.arange(1.0, rows + 1).view(-1, 1) * [3.0, 5.0][rank]).requires_grad_()
        local = ops.reduce_scatter(part, group, 0)
        (local.sum() / rows).backward()
        return local.detach(), part.grad

    for rank, (local, grad) in enumerate(run_ranks(2, body)):
        first = sum(shards[:rank])
        assert local.flatten().tolist() == [8.0 * row for row in range(first + 1, first + shards[rank] + 1)]
        assert grad.flatten().tolist() == pytest.approx([1 / rows] * rows)  # replicated


def test_all_to_all_by_hand():
    """Two ranks exchange rows for columns of [[1, 2], [3, 4]]."""

    def body(rank: int) -> tuple[T, T]:
        row = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[rank : rank + 1].clone().requires_grad_()
        column = ops.all_to_all(row, world(), 1, 0, 2)
        (column * torch.tensor([[10.0], [20.0]])).sum().backward()
        return column.detach(), row.grad

    (first, grad0), (second, grad1) = run_ranks(2, body)
    assert first.flatten().tolist() == [1.0, 3.0] and second.flatten().tolist() == [2.0, 4.0]
    assert grad0.tolist() == [[10.0, 10.0]] and grad1.tolist() == [[20.0, 20.0]]


# -- gradcheck over all ranks: their inputs in one tensor, their outputs in one tensor ---------------------------


class Spread(torch.autograd.Function):
    """This rank's shard of all ranks' inputs; backward puts its gradient into the gradient of all."""

    @staticmethod
    def forward(ctx: Any, everything: T, start: int, stop: int, dim: int) -> T:
        ctx.args = everything.shape, start, stop, dim
        return everything.narrow(dim, start, stop - start).clone()

    @staticmethod
    def backward(ctx: Any, grad: T):
        shape, start, stop, dim = ctx.args
        everything = grad.new_zeros(shape)
        everything.narrow(dim, start, stop - start).copy_(grad)
        dist.all_reduce(everything)
        return everything, None, None, None


class Collect(torch.autograd.Function):
    """All ranks' outputs, flattened and concatenated; backward returns each rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        size, rank = dist.get_world_size(), dist.get_rank()
        most = torch.tensor([float(x.numel())])
        counts = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(counts, most)
        counts = [int(count) for count in counts]
        padded = torch.zeros(max(counts), dtype=x.dtype)
        padded[: x.numel()] = x.reshape(-1)
        parts = [torch.zeros_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded)
        ctx.args = x.shape, sum(counts[:rank]), counts[rank]
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: T):
        shape, start, count = ctx.args
        return grad[start : start + count].view(shape)


def sharded(everything: T, dim: int) -> T:
    group = world()
    return Spread.apply(everything, *even_interval(everything.shape[dim], group.size, group.rank), dim)


SHAPES = [(3, 4), (5, 2), (2, 3, 2)]
GLOBAL: dict[str, Callable[[T, int], T]] = {
    # sums of a replicated value: each rank then computes a different function of it
    "copy": lambda x, dim: ops.copy(x, world()) * (1.0 + dist.get_rank()),
    "gather partial": lambda x, dim: (
        ops.gather(sharded(x, dim), world(), dim, x.shape[dim], "partial") * (1.0 + dist.get_rank())
    ),
    "split": lambda x, dim: ops.split(x, world(), dim),
    "split padded": lambda x, dim: ops.split(x, world(), dim, padded=True),
    "all_to_all": lambda x, dim: ops.all_to_all(sharded(x, dim), world(), (dim + 1) % x.ndim, dim, x.shape[dim]),
}


@pytest.mark.variants(every=8)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", GLOBAL)
def test_gradcheck(name, ranks, shape):
    """Numeric derivatives of the function from all inputs to all outputs, for every dim."""

    def body(rank: int) -> None:
        for dim in range(len(shape)):
            everything = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape)
            everything = everything.sin().requires_grad_()
            assert torch.autograd.gradcheck(lambda x, dim=dim: Collect.apply(GLOBAL[name](x, dim)), (everything,))

    run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradcheck_of_replicated_gradients(ranks):
    """Functions for which every rank has the same output and loss, and so the full gradient."""

    def gathered(x: T) -> T:
        return ops.gather(sharded(x, 0), world(), 0, x.shape[0], "replicate")

    def scattered(x: T) -> T:
        """Each rank's part of the sum is (rank + 1) x."""
        part = ops.copy(x, world()) * (1.0 + dist.get_rank())
        return Collect.apply(ops.reduce_scatter(part, world(), 0))

    def reduced(x: T) -> T:
        return ops.reduce(sharded(x, 0).pow(2).sum(0), world())

    def body(rank: int) -> None:
        everything = torch.linspace(-1, 1, 10, dtype=torch.float64).view(5, 2).sin().requires_grad_()
        assert torch.autograd.gradcheck(gathered, (everything,))
        assert torch.autograd.gradcheck(reduced, (everything,))
        assert torch.autograd.gradcheck(scattered, (everything,))

    run_ranks(ranks, body)


def test_inputs_are_unchanged_and_a_group_of_one_sends_nothing():
    def body(rank: int) -> None:
        group = world()
        x = torch.arange(12.0).view(3, 4)
        for function in (
            lambda: ops.copy(x, group),
            lambda: ops.reduce(x, group),
            lambda: ops.gather(x, group, 0, 3 * group.size, "partial"),
            lambda: ops.reduce_scatter(x, group, 1),
            lambda: ops.split(x, group, 0),
            lambda: ops.all_to_all(x, group, 0, 1, 4 * group.size),
        ):
            before = x.clone()
            function()
            assert torch.equal(x, before)

    run_ranks(2, body)

    def one_rank(rank: int) -> None:
        group, x = world(), torch.arange(12.0).view(3, 4)
        group.pg = None  # any collective would fail
        outs = [
            ops.copy(x, group),
            ops.reduce(x, group),
            ops.sum_both(x, group),
            ops.gather(x, group, 0, 3, "partial"),
            ops.reduce_scatter(x, group, 1),
            ops.split(x, group, 0),
            ops.all_to_all(x, group, 0, 1, 4),
        ]
        assert all(out is x for out in outs)

    run_ranks(1, one_rank)
