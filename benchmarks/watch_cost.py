"""What an open watch costs of a training step.

    torchrun --nproc-per-node 2 -m benchmarks.watch_cost

Forms are a plan and PyTorch's dict, with tensor parallelism (tp) and with sequence parallelism too (tp_sp). Each round
runs, for each form, some steps with a watch and as many without one, in an order that is shuffled; the steps in which
the watch learns what follows what are not counted. Ratios are those of the lower quartiles of all steps, with a 95%
interval by drawing the rounds again: of the processor time of the thread that trains on rank 0, with that of the turns
of the watch's thread, which other load of the machine disturbs less; and of the time. The parts of the watch are timed
by themselves too: a call at each collective, inside modules, in a loop, and a turn of the thread. Between the matmuls
of a model, which fill the caches, calls take some times that.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallelize
from benchmarks import llama
from benchmarks.record import write_record
from benchmarks.timing import join
from parallelize import build_mesh, destroy_groups, local_optimizer, parallelize_module, watch
from parallelize.watchdog.call_patches import recorded

REPEATS = 200
LEARNED_AFTER = 3
"""Steps after which the watch has seen what follows what."""
FORMS = ("plan tp", "plan tp_sp", "dict tp", "dict tp_sp")
Step = Callable[[], None]
Rounds = list[list[tuple[float, float]]]
DRAWS = 400


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
    steps = {form: training_step(options.hidden, options.length, form) for form in FORMS}
    turn_s, interval_s = turn_of_the_thread()
    share = turn_s / interval_s
    times = {form: rounds_of(step, options.rounds, options.steps) for form, step in steps.items()}
    result: dict[str, Any] = {
        "forms": {form: figures_of(times[form], calls_of(steps[form]), share) for form in FORMS},
        "call_us": call_in_a_loop_us(),
        "turn_us": turn_s * 1e6,
        "interval_s": interval_s,
        "settings": {"hidden": options.hidden, "length": options.length, "tp": 2},
    }
    if dist.get_rank() == 0:
        for form, figures in result["forms"].items():
            print(f"{form:<12} {figures['calls']} calls, {figures['step_cpu_ms']:.1f} ms of the processor a step")
            for name in ("cpu_ratio", "ratio"):
                print(
                    f"  {name:<10} {figures[name]['median']:.4f} [{figures[name]['low']:.4f}, "
                    f"{figures[name]['high']:.4f}]"
                )
        print(f"a call in a loop {result['call_us']:.2f} us; a turn of the thread {result['turn_us']:.0f} us")
        write_record(options.json, result)
    destroy_groups()


def training_step(hidden: int, length: int, form: str) -> Step:
    """Forward, backward and optimizer step of a 4-layer model over tp=2."""
    torch.manual_seed(0)
    model = llama.Llama(hidden)
    by, mode = form.split()
    mesh, sequence_parallel = build_mesh("cpu", tp=2), mode == "tp_sp"
    if by == "plan":
        parallelize_module(model, mesh, llama.plan(), sequence_parallel=sequence_parallel)
    else:
        parallelize_module(model, mesh, llama.stock_styles(sequence_parallel, styles=parallelize))
    optimizer = local_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.randint(0, 100, (2, length), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        logits = model(ids)
        F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def rounds_of(step: Step, rounds: int, steps: int) -> dict[str, Rounds]:
    """(seconds of the processor, seconds) of each step, by round, by whether it was watched."""
    times: dict[str, Rounds] = {"watched": [], "alone": []}
    order = random.Random(0)
    for _ in range(2):
        step()
    for _ in range(rounds):
        for form in order.sample(["watched", "alone"], 2):
            with watch(timeout_s=60.0) if form == "watched" else nullcontext():
                for _ in range(LEARNED_AFTER):
                    step()
                dist.barrier(apart())
                times[form].append([timed(step) for _ in range(steps)])
    return times


def figures_of(times: dict[str, Rounds], calls: int, thread_share: float) -> dict[str, Any]:
    """What is recorded of a form. thread_share: of the time, which the turns of the watch's thread take of the
    processor."""
    cpu, seconds = ({form: column(times[form], index) for form in times} for index in (0, 1))
    cpu_s, elapsed_s = quartile(cpu["alone"]), quartile(seconds["alone"])
    return {
        "calls": calls,
        "cpu_ratio": quartile_ratio(cpu, added=thread_share * elapsed_s / cpu_s),
        "ratio": quartile_ratio(seconds),
        "step_ms": elapsed_s * 1e3,
        "step_cpu_ms": cpu_s * 1e3,
    }


def column(rounds: Rounds, index: int) -> list[list[float]]:
    return [[step[index] for step in steps] for steps in rounds]


def quartile(rounds: list[list[float]]) -> float:
    """The lower quartile of all steps: what else runs on the machine makes steps longer, never shorter."""
    values = sorted(value for steps in rounds for value in steps)
    return values[len(values) // 4]


def quartile_ratio(rounds: dict[str, list[list[float]]], added: float = 0.0) -> dict[str, float]:
    """Lower quartile of the watched steps over that of the others, with the 95% interval of drawing the rounds
    again."""
    draw, count = random.Random(0), len(rounds["alone"])

    def drawn() -> float:
        chosen = [draw.randrange(count) for _ in range(count)]
        watched, alone = ([rounds[form][index] for index in chosen] for form in ("watched", "alone"))
        return quartile(watched) / quartile(alone) + added

    ratios = sorted(drawn() for _ in range(DRAWS))
    middle = quartile(rounds["watched"]) / quartile(rounds["alone"]) + added
    return {"median": middle, "low": ratios[DRAWS // 40], "high": ratios[-DRAWS // 40 - 1]}


@lru_cache(maxsize=1)
def apart() -> dist.ProcessGroup:
    """A group for barriers, so that in the group of the model each step follows on the one before."""
    return dist.new_group()


def timed(step: Step) -> tuple[float, float]:
    """(seconds of the processor, of the thread that calls; seconds) of a step."""
    began, cpu_began = time.perf_counter(), time.thread_time()
    step()
    return time.thread_time() - cpu_began, time.perf_counter() - began


class Probe(nn.Module):
    """Calls a recorded method of a process group many times, inside as many modules as the calls of a model are."""

    def __init__(self, call: Callable[[], None], depth: int = 4):
        super().__init__()
        self.inner: Probe | None = Probe(call, depth - 1) if depth else None
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


def calls_of(step: Step) -> int:
    """Calls of process groups in a step."""
    with watch(timeout_s=60.0) as open_watch:
        step()
        assert open_watch.watched is not None
        return open_watch.watched.log.count


def turn_of_the_thread() -> tuple[float, float]:
    """(seconds of the processor that a turn takes, seconds between turns)."""
    with watch(timeout_s=60.0) as open_watch:
        assert open_watch.thread is not None
        probe = Probe(open_watch.thread.tick, 0)
        probe()
        return statistics.median(probe.seconds), open_watch.thread.interval_s


def call_in_a_loop_us() -> float:
    """Microseconds that recording a collective takes with warm caches, four modules deep."""
    with watch(timeout_s=60.0) as open_watch:
        assert open_watch.watched is not None
        group, x = dist.group.WORLD, torch.zeros(4, 16, 48)
        method = recorded(lambda pg, tensors: None, "allreduce", open_watch.watched.log)
        innermost = probe = Probe(lambda: method(group, [x]))
        probe()
        while innermost.inner is not None:
            innermost = innermost.inner
        return statistics.median(innermost.seconds) * 1e6


if __name__ == "__main__":
    main()
