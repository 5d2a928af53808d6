"""What an open watch costs of a training step.

    torchrun --nproc-per-node 2 -m benchmarks.watch_cost

Each round runs some steps with a watch and as many without one, in an order that is shuffled; the steps in which the watch learns
what follows what are not counted. Ratios are medians over rounds, with a 95% interval of the median: of the time between barriers,
and of the processor time of rank 0, which other load of the machine disturbs less. The share is what the parts of the watch take, each timed by
itself in a loop, of the processor time of a step: a call at each collective, inside modules, and the turns of the thread. Between the
matmuls of a model, which fill the caches, they take some times that.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks import llama
from benchmarks.record import write_record
from benchmarks.timing import Times, join, ratio
from parallelize import build_mesh, destroy_groups, local_optimizer, parallelize_module, watch
from parallelize.watchdog.call_patches import recorded

REPEATS = 200
LEARNED_AFTER = 3
"""Steps after which the watch has seen what follows what."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=5, help="a round and form")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    join()
    apart()
    step = training_step(options.hidden, options.length)
    times = rounds_of(step, options.rounds, options.steps)
    parts = parts_of(step)
    cpu_s = statistics.median(times["alone cpu"])
    turns = statistics.median(times["alone"]) / parts["interval_s"]
    result: dict[str, Any] = {
        "share": (parts["calls"] * parts["call_us"] + turns * parts["turn_us"]) * 1e-6 / cpu_s,
        "ratio": ratio(times, "watched", "alone"),
        "cpu_ratio": ratio(times, "watched cpu", "alone cpu"),
        "step_ms": {name: statistics.median(values) * 1e3 for name, values in times.items()},
        **parts,
        "settings": {"hidden": options.hidden, "length": options.length, "tp": 2},
    }
    if dist.get_rank() == 0:
        for name in ("alone", "watched", "first", "alone cpu", "watched cpu"):
            print(f"{name:<12} {result['step_ms'][name]:8.1f} ms")
        for name in ("ratio", "cpu_ratio"):
            print(f"{name:<12} {result[name]['median']:.4f} [{result[name]['low']:.4f}, {result[name]['high']:.4f}]")
        print(
            f"{result['calls']} calls a step of {result['call_us']:.2f} us; a turn of the thread {result['turn_us']:.0f} us"
        )
        print(f"share        {result['share']:.4f} of a step")
        write_record(options.json, result)
    destroy_groups()


def training_step(hidden: int, length: int) -> Any:
    """Forward, backward and optimizer step of a 4-layer model over tp=2."""
    torch.manual_seed(0)
    model = llama.Llama(hidden)
    parallelize_module(model, build_mesh("cpu", tp=2), llama.plan())
    optimizer = local_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.randint(0, 100, (2, length), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        logits = model(ids)
        F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def rounds_of(step: Any, rounds: int, steps: int) -> Times:
    """Seconds a step, by form, and of the first step of each watch."""
    times: Times = {name: [] for name in ("watched", "alone", "first", "watched cpu", "alone cpu")}
    order = random.Random(0)
    for _ in range(2):
        step()
    for _ in range(rounds):
        for form in order.sample(["watched", "alone"], 2):
            open_watch = watch(timeout_s=60.0) if form == "watched" else None
            times["first"] += [timed(step, 1)[0]] if form == "watched" else []
            for _ in range(LEARNED_AFTER):
                step()
            seconds, cpu_seconds = timed(step, steps)
            times[form].append(seconds)
            times[f"{form} cpu"].append(cpu_seconds)
            if open_watch is not None:
                open_watch.close()
    return times


@lru_cache(maxsize=1)
def apart() -> dist.ProcessGroup:
    """A group for barriers, so that in the group of the model each step follows on the one before."""
    return dist.new_group()


def timed(step: Any, steps: int) -> tuple[float, float]:
    """(seconds a step, from when all ranks begin until all have ended; seconds of the processor, of this process)."""
    dist.barrier(apart())
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    dist.barrier(apart())
    return (time.perf_counter() - began) / steps, (time.process_time() - cpu_began) / steps


class Probe(nn.Module):
    """Calls a recorded method of a process group many times, inside as many modules as the calls of a model are."""

    def __init__(self, call: Callable[[], None], depth: int = 4):
        super().__init__()
        self.inner = Probe(call, depth - 1) if depth else None
        self.call = call
        self.seconds: list[float] = []

    def forward(self) -> None:
        if self.inner is not None:
            self.inner()
            return
        for _ in range(REPEATS):
            began = time.thread_time()
            self.call()
            self.seconds.append(time.thread_time() - began)


def parts_of(step: Any) -> dict[str, float]:
    """Collectives of a step, microseconds that recording one takes, those of a turn of the thread, seconds between turns."""
    with watch(timeout_s=60.0) as open_watch:
        watched, thread = open_watch.watched, open_watch.thread
        assert watched is not None and thread is not None
        step()
        calls = watched.log.count
        group, x = dist.group.WORLD, torch.zeros(4, 16, 48)
        method = recorded(lambda pg, tensors: None, "allreduce", None, watched.log, watched.gate.check)
        probe = Probe(lambda: method(group, [x]))
        probe()
        turns = Probe(thread.tick, 0)
        turns()
        interval_s = thread.interval_s
    innermost: Any = probe
    while innermost.inner is not None:
        innermost = innermost.inner
    call_us, turn_us = (statistics.median(module.seconds) * 1e6 for module in (innermost, turns))
    return {"calls": calls, "call_us": call_us, "turn_us": turn_us, "interval_s": interval_s}


if __name__ == "__main__":
    main()
