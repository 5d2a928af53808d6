"""Many ranks in one process: PyTorch's threaded process group. Real numbers, real rank-dependent code, no torchrun."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11's threaded group lacks what destroying one reads
    threaded.ThreadLocalWorld.comms = property(lambda self: [])


def run_ranks(world_size: int, body: Callable[[int], Any], timeout_s: float = 120.0) -> list[Any]:
    """Run `body(rank)` on every rank as a thread; return the results in rank order, raise the first failure."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store = dist.HashStore()
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            try:
                results[rank] = body(rank)
            finally:
                dist.destroy_process_group()
        except BaseException as error:  # a thread's failure is raised again by the caller
            failures.append((rank, error))
            if "arrier" not in str(error):
                error.__notes__ = [*getattr(error, "__notes__", []), f"rank {rank}:\n{traceback.format_exc()}"]
            threaded.ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        if any(thread.is_alive() for thread in threads) and not failures:
            raise TimeoutError(f"ranks still run after {timeout_s} s")
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        raise min(failures, key=lambda item: (isinstance(item[1], SystemExit), item[0]))[1]
    return results
