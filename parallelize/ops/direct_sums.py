"""Reduce-scatter by direct messages: each rank sends every other rank its part once, and adds what it gets in rank order.

gloo's own reduce-scatter sends twice the bytes, as an all-reduce does. The sum does not depend on a ring's order: equal inputs
give equal bits on every rank, and half-precision sums of three or more ranks are taken in float32.
"""

from __future__ import annotations

import torch

from parallelize._torch_private import counts_collectives
from parallelize.comm.groups import Group
from parallelize.comm.p2p import Exchange
from parallelize.comm.turns import hand_over

T = torch.Tensor
_STREAM = 11
_HALF = (torch.float16, torch.bfloat16)


def reduce_scatter(x: T, group: Group) -> T:
    """Contiguous [size * n, ...] on each rank -> this rank's [n, ...] of the sum, a new tensor."""
    if not _goes_directly(x, group):
        return group.reduce_scatter(x)
    parts = x.chunk(group.size)
    peers = [(group.rank + n) % group.size for n in range(1, group.size)]
    received = {peer: torch.empty_like(parts[peer]) for peer in peers}
    out = parts[group.rank].clone()
    with Exchange(group) as exchange:
        step = exchange.post({peer: parts[peer] for peer in peers}, received, _STREAM, record=False)
        hand_over()
        step.wait()
        sum_in_order(out, received, group.rank)
    return out


def _goes_directly(x: T, group: Group) -> bool:
    if torch.compiler.is_compiling() or counts_collectives() or group.wire is not None:
        return False
    return group.backend(x.device) == "gloo"


def sum_in_order(local: T, others: dict[int, T], rank: int) -> None:
    """local = the sum of all ranks' contributions in rank order; in fp32 for three or more in half precision."""
    size = len(others) + 1
    if not local.numel() or size == 1:
        return
    if local.dtype in _HALF and size > 2:
        total = (local if rank == 0 else others[0]).float()
        for other in range(1, size):
            total += local if other == rank else others[other]
        local.copy_(total)
    else:  # the sum of lower ranks, then local, then higher ranks; a sum of two does not depend on the order
        for other in range(1, rank):
            others[0].add_(others[other])
        if rank:
            local.add_(others[0])
        for other in range(rank + 1, size):
            local.add_(others[other])
