"""How long a save takes, before the first one was measured: bytes of this rank, and how fast its folder takes them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from parallelize.checkpoint.format import disk
from parallelize.checkpoint.run.run_contents import Run

PROBE_BYTES = 4 * 2**20
_HASH_BYTES_PER_S = 1e9
"""Of one core: hashing and copying, together."""
_STATES = 2  # of Adam, by parameter


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the local shards of tensors, each storage once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storages[id(local)] = local.numel() * local.element_size()
    return sum(storages.values())


def write_speed(folder: Path) -> float:
    """Bytes per second of a file that is written and flushed to a folder, which is made if it is missing. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".speed-{os.getpid()}"
    began = time.perf_counter()
    try:
        with disk.reporting_errors(path):
            disk.write_file(path, bytes(PROBE_BYTES))
    finally:
        path.unlink(missing_ok=True)
    return PROBE_BYTES / (time.perf_counter() - began)


def state_bytes(run: Run) -> int:
    """Bytes of the model and its optimizers on this rank, where states that are not made yet count as those of Adam."""
    total = local_bytes(run.module.parameters())
    for optimizer in run.optimizers.values():
        made = local_bytes(
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        )
        stepped = local_bytes(parameter for group in optimizer.param_groups for parameter in group["params"])
        total += made or _STATES * stepped
    return total


def expected_save_s(folder: Path, run: Run) -> float:
    """Seconds of a save on this rank. Raises: CheckpointError `write-failed`. Cost: a small file."""
    num_bytes, speed = state_bytes(run), write_speed(folder)
    return num_bytes / speed + num_bytes / _HASH_BYTES_PER_S
