"""Cost of the comparison of ranks in each step, interleaved in one run: a share of the step's time.

    torchrun --nproc-per-node 2 -m benchmarks.step_check
    torchrun --nproc-per-node 2 -m benchmarks.step_check --axis dp

Variants of the same step of a 4-layer Llama-like model over `tp` or `dp`, with AdamW: ranks compare the call; they
compare what they store too (what the default does in every `compare_every`-th step); they send the message and compare
nothing (`check_replicated=False`); nothing is sent before the step, and the loss is not divided. Ratios of whole steps
are noisy, so the check alone is timed too, in steps whose ranks enter it together: `check_ms`, and its share of a step.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import llama
from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, ratio
from parallelize import Options, build_mesh, destroy_groups, parallelize_model
from parallelize.plan.options import STANDARD

COMPARE_EVERY = {"compared": 0, "replicas compared": 1, "not compared": 0, "no message": 0}
"""Variant to steps between comparisons of replicas; 0: none."""


def steps(
    hidden: int, axis: str, batch: int, length: int
) -> tuple[dict[str, Callable[[], None]], Callable[[int], list[float]]]:
    """(a step of each variant, what gives the seconds of the check alone in so many steps)."""
    mesh = build_mesh("cpu", **{axis: dist.get_world_size()})
    stock = llama.Llama(hidden)
    generator = torch.Generator().manual_seed(dist.get_rank() if axis == "dp" else 0)
    ids = torch.randint(0, 512, (batch, length), generator=generator)
    targets = ids.roll(-1, 1)

    checks: dict[str, Any] = {}

    def variant(name: str) -> Callable[[], None]:
        plan = llama.plan() if axis == "tp" else None
        options = Options(compare_every=COMPARE_EVERY[name])
        compares = name.endswith("compared") and name != "not compared"
        parallel = parallelize_model(copy.deepcopy(stock), mesh, plan, options, check_replicated=compares)
        optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-4)
        checks[name] = parallel.pipeline.check
        if name == "no message":
            count: Any = torch.tensor(targets.numel())
            parallel.pipeline.check.total = lambda *_: count  # type: ignore[method-assign]

        def run() -> None:
            parallel.step(ids, targets=targets)
            optimizer.step()
            optimizer.zero_grad()

        return run

    variants = {name: variant(name) for name in COMPARE_EVERY}

    def seconds_of_the_check(number: int) -> list[float]:
        check, seconds = checks["compared"], []
        total = check.total

        def timed(*args: Any) -> Any:
            dist.barrier()
            start = time.perf_counter()
            count = total(*args)
            seconds.append(time.perf_counter() - start)
            return count

        check.total = timed
        for _ in range(number):
            variants["compared"]()
        return seconds

    return variants, seconds_of_the_check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", choices=["tp", "dp"], default="tp")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    join()
    variants, seconds_of_the_check = steps(options.hidden, options.axis, options.batch, options.length)
    times = interleaved(variants, options.rounds)
    check = statistics.median(seconds_of_the_check(options.rounds))
    setting = {name: getattr(options, name) for name in ("axis", "hidden", "batch", "length", "rounds")}
    result: dict[str, Any] = {
        **setting,
        "step_ms": {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()},
        "compared/not compared": ratio(times, "compared", "not compared"),
        "compared/no message": ratio(times, "compared", "no message"),
        "replicas compared/compared": ratio(times, "replicas compared", "compared"),
    }
    result["check_ms"] = check * 1e3
    result["share_of_the_check"] = check * 1e3 / result["step_ms"]["compared"]
    more = result["step_ms"]["replicas compared"] - result["step_ms"]["compared"]
    result["share_of_replicas"] = more / result["step_ms"]["compared"] / STANDARD.compare_every
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=1))
        write_record(options.json, result)
    destroy_groups()


if __name__ == "__main__":
    main()
