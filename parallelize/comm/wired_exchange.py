"""An all-to-all of simulated ranks, whose messages go from hand to hand instead of through a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def exchange_by_wire(
    wire: Callable[..., list[Any]], rank: int, x: torch.Tensor, sent: list[int], received: list[int]
) -> torch.Tensor:
    """[sum(sent)] -> [sum(received)], flat, by rank.

    Args:
        wire: as `comm.groups.Wire`. rank: of the group.
        sent, received: numbers of elements by rank.
    """
    out = x.new_empty(sum(received))
    chunks, targets = x.split(sent), out.split(received)
    peers = [peer for peer in range(len(sent)) if peer != rank]
    pending = wire({peer: chunks[peer] for peer in peers}, {peer: targets[peer] for peer in peers}, 0)
    targets[rank].copy_(chunks[rank])
    for message in pending:
        message.wait()
    return out
