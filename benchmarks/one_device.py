"""What the benchmarks of one GPU share: a group of one process, waiting for the device, and peak memory. They run on a
CPU too."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from benchmarks.memory import peak_bytes

R = TypeVar("R")


def start(device: str) -> None:
    """Make a process group of this process alone."""
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
    }
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


def wait() -> None:
    """Wait until the GPU has done what was started; return at once where there is none."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def until_done(work: dict[str, Callable[[], R]]) -> dict[str, Callable[[], R]]:
    """Each call until the device has done it: one that reads nothing on the host would return before."""

    def waiting(run: Callable[[], R]) -> Callable[[], R]:
        def call() -> R:
            result = run()
            wait()
            return result

        return call

    return {name: waiting(run) for name, run in work.items()}


def peak_of(run: Callable[[], object]) -> int:
    """The bytes that a call allocates at most, beside what there was before."""
    if not torch.cuda.is_available():
        return peak_bytes(run)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before
