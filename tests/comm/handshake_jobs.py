"""What ranks do that come to a handshake, or end before."""

from __future__ import annotations

import time

import torch

from parallelize import build_mesh, parallelize_module
from tests.support.models import tiny_model


def one_ends_before(rank: int, ending: int) -> None:
    """A rank ends with an error after the mesh was built, the other comes to its first handshake. No watch is open."""
    mesh = build_mesh("cpu", tp=2)
    if rank == ending:
        raise ValueError("boom before planning")
    began = time.monotonic()
    try:
        parallelize_module(tiny_model("llama"), mesh)
    finally:
        print(f"waited {time.monotonic() - began:.1f} s")


def another_mesh(rank: int) -> None:
    """The same ranks, along another axis."""
    mesh = build_mesh("cpu", **({"dp": 2, "tp": 1} if rank else {"dp": 1, "tp": 2}))
    parallelize_module(torch.nn.Sequential(torch.nn.Linear(4, 4)), mesh, {"0": "colwise"}, own_reduction=True)
