"""The chunked matmuls by PyTorch's symmetric-memory kernels: CUDA only, between devices that can map each other's
memory.

The kernels take even shards, and a single matmul to scatter. Any other call of these functions uses the chunked
version, over the same group.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Iterable, Sequence

import torch

from parallelize.base.errors import MeshError, Problem
from parallelize.base.torch_private import torch_groups as private_groups
from parallelize.comm.groups import Group
from parallelize.comm.handshake import over_ranks
from parallelize.ops.matmul import chunked_matmul
from parallelize.ops.matmul.chunked_matmul import MatmulSum, Thunk
from parallelize.ops.matmul.op_handshake import agree

T = torch.Tensor
_STEPS = 4  # of the chunked version, if no kernel fits
_HOST = torch.device("cpu")


def unavailable(group: Group, device: torch.device) -> str:
    """Why this group cannot use symmetric memory on this device; empty if it can.

    The first call is a collective: ranks map each other's memory, and none uses it where one of them could not.
    """
    if reason := _reason_of_device(device):
        return reason
    if group.state.no_symmetric_memory is None:
        if torch.compiler.is_compiling():
            return "ranks cannot map each other's memory while a graph is compiled; make a call before"
        agree(group, device, "symmetric memory")
        group.state.no_symmetric_memory = _tried(group)
    return group.state.no_symmetric_memory


def _tried(group: Group) -> str:
    """Why a rank of the group cannot map the memory of the others; empty if each can."""
    hosts = over_ranks(group, zlib.crc32(socket.gethostname().encode()), _HOST)
    if len(set(hosts)) > 1:  # PyTorch passes descriptors from rank to rank, and would wait for those of another host
        return "the group's ranks are on several hosts"
    reason = private_groups.enable_symmetric_memory(group.pg)
    failed = [rank for rank, number in enumerate(over_ranks(group, bool(reason), _HOST)) if number]
    return reason or (f"rank {group.ranks[failed[0]]} cannot map the others' memory" if failed else "")


def _reason_of_device(device: torch.device) -> str:
    return "" if device.type == "cuda" else f"symmetric memory needs CUDA, and this is {device.type}"


def require(group: Group, device: torch.device) -> None:
    """Raises: MeshError `no-symmetric-memory` with the reason, which `unavailable` finds."""
    _refuse(unavailable(group, device))


def require_cuda(device: torch.device) -> None:
    """The part of `require` that needs no other rank. Raises: MeshError `no-symmetric-memory`."""
    _refuse(_reason_of_device(device))


def _refuse(reason: str) -> None:
    if reason:
        raise MeshError(Problem("no-symmetric-memory", reason, fix="overlap: auto or chunked, which work on any group"))


def all_gather_matmul(
    x: T,
    rights: Sequence[T],
    biases: Sequence[T | None],
    dim: int,
    full: int,
    group: Group,
    *,
    line: str = "",
    keep: bool = True,
) -> tuple[list[T], T]:
    """As `chunked_matmul.all_gather_matmul`."""
    if full % group.size or not rights:
        return chunked_matmul.all_gather_matmul(x, rights, biases, dim, full, group, steps=_STEPS, line=line, keep=keep)
    if line:
        agree(group, x.device, line)
    cast = x if x.dtype == rights[0].dtype else x.to(rights[0].dtype)
    gathered, outs = private_groups.symmetric_ops().fused_all_gather_matmul(
        cast.contiguous(), list(rights), dim, group.pg.group_name, return_A=True
    )
    pairs = zip(outs, biases, strict=True)
    return [out if bias is None else out + bias for out, bias in pairs], gathered.to(x.dtype)


def matmul_reduce_scatter(
    total: MatmulSum, dim: int, group: Group, meanwhile: Iterable[Thunk] = (), line: str = ""
) -> T:
    """As `chunked_matmul.matmul_reduce_scatter`."""
    if len(total.pairs) != 1 or total.base is not None or total.shape[dim] % group.size:
        return chunked_matmul.matmul_reduce_scatter(total, dim, group, _STEPS, meanwhile, line)
    if line:
        agree(group, total.pairs[0][0].device, line)
    left, right = total.pairs[0]
    left = left if left.dtype == right.dtype else left.to(right.dtype)
    out = private_groups.symmetric_ops().fused_matmul_reduce_scatter(left, right, "sum", dim, group.pg.group_name)
    for work in meanwhile:
        work()
    return out
