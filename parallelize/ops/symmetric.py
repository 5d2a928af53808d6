"""The same products by PyTorch's symmetric-memory kernels: CUDA only, between devices that can map each other's memory.

Used where the kernels fit (even shards, one dim of rows, a single product to scatter); anything else inside an op that
runs this way is done by the pipelined version, over the same group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from parallelize import _torch_private as private
from parallelize.errors import MeshError, Problem
from parallelize.groups import Group
from parallelize.ops import pipeline
from parallelize.ops.agreement import agree
from parallelize.ops.pipeline import Sum, Thunk

T = torch.Tensor
_STEPS = 4  # of the pipelined version, where a kernel does not fit


def unavailable(group: Group, device: torch.device) -> str:
    """Why this group cannot use symmetric memory on this device; empty where it can."""
    if device.type != "cuda":
        return f"symmetric memory needs CUDA, and this is {device.type}"
    return private.enable_symmetric_memory(group.pg)


def require(group: Group, device: torch.device) -> None:
    """Raises: MeshError `no-symmetric-memory` saying why."""
    why = unavailable(group, device)
    if why:
        raise MeshError(Problem("no-symmetric-memory", why, fix="overlap: auto or chunked, which work on any group"))


def gather_products(
    x: T,
    rights: Sequence[T],
    biases: Sequence[T | None],
    dim: int,
    full: int,
    group: Group,
    line: str = "",
    keep: bool = True,
) -> tuple[list[T], T]:
    """As `pipeline.gather_products`."""
    if full % group.size or not rights:
        return pipeline.gather_products(x, rights, biases, dim, full, group, _STEPS, line=line, keep=keep)
    if line:
        agree(group, x.device, line)
    cast = x if x.dtype == rights[0].dtype else x.to(rights[0].dtype)
    gathered, outs = private.symmetric_ops().fused_all_gather_matmul(
        cast.contiguous(), list(rights), dim, group.pg.group_name, return_A=True
    )
    pairs = zip(outs, biases, strict=True)
    return [out if bias is None else out + bias for out, bias in pairs], gathered.to(x.dtype)


def scatter_products(total: Sum, dim: int, group: Group, meanwhile: Iterable[Thunk] = (), line: str = "") -> T:
    """As `pipeline.scatter_products`."""
    if len(total.pairs) != 1 or total.base is not None or total.shape[dim] % group.size:
        return pipeline.scatter_products(total, dim, group, _STEPS, meanwhile, line)
    if line:
        agree(group, total.pairs[0][0].device, line)
    left, right = total.pairs[0]
    left = left if left.dtype == right.dtype else left.to(right.dtype)
    out = private.symmetric_ops().fused_matmul_reduce_scatter(left, right, "sum", dim, group.pg.group_name)
    for work in meanwhile:
        work()
    return out
