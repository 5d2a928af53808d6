"""PyTorch's functional collectives with the results of the blocking ones, for tools that know these ops by their
names."""

from __future__ import annotations

import torch
import torch.distributed as dist

_ops = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, pg: dist.ProcessGroup, op: str = "sum") -> None:
    """Reduce over ranks, in place."""
    x.copy_(_ops.wait_tensor(_ops.all_reduce(x, op, pg.group_name)))


def all_gather(out: torch.Tensor, x: torch.Tensor, pg: dist.ProcessGroup) -> None:
    """[n, ...] on each rank -> `out` [size * n, ...]."""
    out.copy_(gathered(x, pg))


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, pg: dist.ProcessGroup) -> None:
    """[size * n, ...] on each rank -> this rank's [n, ...] of the sum, in `out`."""
    out.copy_(scattered_sum(x, pg))


def gathered(x: torch.Tensor, pg: dist.ProcessGroup) -> torch.Tensor:
    """[n, ...] on each rank -> a new [size * n, ...]."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x, pg.size(), pg.group_name))


def scattered_sum(x: torch.Tensor, pg: dist.ProcessGroup) -> torch.Tensor:
    """[size * n, ...] on each rank -> this rank's [n, ...] of the sum, a new tensor."""
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x, "sum", pg.size(), pg.group_name))


def all_to_all(out: torch.Tensor, x: torch.Tensor, received: list[int], sent: list[int], pg: dist.ProcessGroup) -> None:
    """Flat [sum(sent)] -> `out` [sum(received)]; numbers of elements by rank."""
    out.copy_(_ops.wait_tensor(_ops.all_to_all_single(x, received, sent, pg.group_name)))
