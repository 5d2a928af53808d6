"""What ranks do with the states of their generators."""

from __future__ import annotations

import random

import numpy
import torch

from parallelize import axis_group, build_mesh, random_state, set_random_state, synchronize_random_state


def draws() -> tuple[float, ...]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def synchronized(rank: int, source: int) -> dict[str, tuple[float, ...]]:
    """What this rank draws before, over tp, over both axes, and with its own state again."""
    mesh = build_mesh("cpu", dp=2, tp=2)
    torch.manual_seed(rank), random.seed(rank), numpy.random.seed(rank)
    start = random_state()
    drawn = {"own": draws()}
    set_random_state(start)
    before = synchronize_random_state(mesh["tp"], source)
    drawn["tp"] = draws()
    set_random_state(before)
    drawn["own again"] = draws()
    synchronize_random_state(axis_group(mesh, "dp", "tp"))
    drawn["all"] = draws()
    return drawn
