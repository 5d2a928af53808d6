"""What the benchmarks share: interleaved timing, medians with intervals, joining the other ranks."""

from __future__ import annotations

import os
import random
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

Times = dict[str, list[float]]


def join(timeout_s: float = 120.0) -> None:
    """Join the ranks that torchrun or `slow_link` has started, over gloo, one thread each.

    Exits if neither did.
    """
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit(
            "start me with: torchrun --nproc-per-node 2 -m ..., or python -m benchmarks.slow_link -- -m ..."
        )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


def interleaved(
    work: dict[str, Callable[[], object]],
    rounds: int,
    inner: int = 1,
    before: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Seconds a call, `rounds` of each; the order within a round is shuffled, the same on every rank.

    Args:
        before: called before each timing, not counted (a barrier). clock: seconds; `time.process_time` is that of the
            processor.
    """
    order = random.Random(0)
    for run in work.values():
        run()
        run()
    times: Times = {name: [] for name in work}
    for _ in range(rounds):
        for name in order.sample(list(work), len(work)):
            if before is not None:
                before()
            began = clock()
            for _ in range(inner):
                work[name]()
            times[name].append((clock() - began) / inner)
    return times


def ratio(times: Times, top: str, bottom: str) -> dict[str, float]:
    """Median of per-round ratios, and the 95% interval of that median (order statistics)."""
    ratios = sorted(a / b for a, b in zip(times[top], times[bottom], strict=True))
    n = len(ratios)
    half = 0.98 * n**0.5
    low, high = ratios[max(0, int(n / 2 - half))], ratios[min(n - 1, int(n / 2 + half))]
    return {"median": statistics.median(ratios), "low": low, "high": high}


def medians_ms(times: Times) -> dict[str, float]:
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}
