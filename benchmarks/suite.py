"""Every benchmark, one after the other; each writes a record, NAME.json.

    make bench                                   # short forms, into benchmarks/short/
    python -m benchmarks.suite --full            # more rounds and sizes, into benchmarks/results/, which the documents quote
    python -m benchmarks.suite --only zero load  # some of them
    python -m benchmarks.suite --list

Short forms take under 15 minutes together on two cores. They show that each benchmark runs and about what it gives:
their sizes are not those of the documents, so that they never stand in the tables. Runs over a slow link need Linux,
root, `ip` and `tc`, and those of a GPU need one; without these they are left out, and named. Exit status: 1 if a run
failed.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.record import RESULTS
from benchmarks.slow_link import EmulationError, check

ROOT = Path(__file__).parents[1]
SHORT = RESULTS.parent / "short"
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Run:
    """One call of a benchmark.

    Attributes:
        name: of its record. script: the module in `benchmarks/`.
        short: arguments of the short form. full: of the full form.
        ranks: processes that torchrun starts; 0: one process, without torchrun.
        rate: of the emulated link between the ranks, as `tc` writes it; empty: loopback.
        emulates: it makes namespaces and links by itself.
        gpu: it needs a GPU, and is left out without one.
    """

    name: str
    script: str
    short: str = ""
    full: str = ""
    ranks: int = 0
    rate: str = ""
    emulates: bool = False
    gpu: bool = False

    def command(self, full: bool, folder: Path) -> list[str]:
        arguments = [*(self.full if full else self.short).split(), "--json", str(folder / f"{self.name}.json")]
        if self.rate:
            link = ["-m", "benchmarks.slow_link", "--ranks", str(self.ranks), "--rate", self.rate, "--"]
            return [sys.executable, *link, "-m", f"benchmarks.{self.script}", *arguments]
        if self.ranks:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
            return [sys.executable, *torchrun, "-m", f"benchmarks.{self.script}", *arguments]
        return [sys.executable, "-m", f"benchmarks.{self.script}", *arguments]


_SHORT_KERNELS = "--hidden 1024 --layers 16 --length 512 --rounds 20 --compile"
_SMALL_STEP = "--hidden 64 --layers 2 --length 512 --rounds 2"

RUNS = (
    Run("host_overhead_fake", "host_overhead", "--hidden 64 --rounds 10", "--hidden 64"),
    Run("recommended_step", "recommended_step", "--layers 2 --rounds 5", ""),
    Run(
        "host_overhead_gloo_step",
        "host_overhead",
        "--step-only --hidden 256 --rounds 5",
        "--step-only --hidden 256",
        2,
    ),
    Run(
        "collective_matmul_1gbit",
        "collective_matmul",
        "--square --rounds 3 --chunks 8 --ops all_gather_linear linear_reduce_scatter",
        "",
        2,
        "1gbit",
    ),
    Run("microbatch_step_1gbit", "microbatch_step", _SMALL_STEP, "--microbatches 8", 2, "1gbit"),
    Run(
        "microbatch_step_dict_1gbit",
        "microbatch_step",
        f"{_SMALL_STEP} --dict",
        "--hidden 512 --dict",
        2,
        "1gbit",
    ),
    Run(
        "microbatch_step_1024_1gbit",
        "microbatch_step",
        _SMALL_STEP,
        "--hidden 1024 --layers 2",
        2,
        "1gbit",
    ),
    Run(
        "microbatch_step_10gbit",
        "microbatch_step",
        f"{_SMALL_STEP} --rate 1e10 --auto",
        "--hidden 256 --rate 1e10 --auto",
        2,
        "10gbit",
    ),
    Run("microbatch_step_4_1gbit", "microbatch_step", _SMALL_STEP, "--hidden 256", 4, "1gbit"),
    Run("llama_step_1gbit", "llama_step", "--hidden 256 --rounds 3", "", 2, "1gbit"),
    Run("experts_2_loopback", "experts", "--rounds 5", "--rounds 16", 2),
    Run("experts_2_1gbit", "experts", "--rounds 3", "--rounds 16", 2, "1gbit"),
    Run("experts_4_loopback", "experts", "--rounds 2", "--rounds 8", 4),
    Run("expert_dispatch_1gbit", "expert_dispatch", "--rounds 5", "--rounds 16", 2, "1gbit"),
    Run("pipeline", "pipeline", "--rounds 4", "", 2),
    Run("pipeline_bubble", "pipeline", "--bubble --ms 20", "--bubble", 4),
    Run("zero", "zero", "--rounds 2", "", 2),
    Run("zero_memory", "zero", "--memory --repeats 1 --stages 0 3", "--memory"),
    Run("zero_table", "zero", "--table", "--table", 4),
    Run("long_context_2_loopback", "long_context", "--lengths 4096 --rounds 2", "", 2),
    Run("ring_attention", "ring_attention", "--length 4096 --dtypes float32 --rounds 2", "", 2),
    Run("compiled_step", "compiled_step", "--hidden 256 --rounds 5 --forms tensor sequence", "", 2),
    Run("fused_loss", "fused_loss", "--tokens 512 --rounds 2"),
    Run("distillation", "distillation", "--tokens 512 --rounds 2"),
    Run("generate", "generate", "--batch 1 --rounds 3", "--rounds 15", 2),
    Run("generation_log_probs", "generation_log_probs", "--rows 8 --new 16"),
    Run("generation_log_probs_tp2", "generation_log_probs", "--rows 8 --new 16", "", 2),
    Run("step_check_tp", "step_check", "--axis tp --rounds 8", "--axis tp", 2),
    Run("step_check_dp", "step_check", "--axis dp --rounds 8", "--axis dp", 2),
    Run("watch_cost", "watch_cost", "--rounds 2", "", 2),
    Run("preflight", "preflight", "--hosts 2 --ranks 2", emulates=True),
    Run("checkpoint", "checkpoint", "--rounds 3", "", 2),
    Run("load", "load", "--layers 6 --rounds 2"),
    Run("export", "export", "--rounds 3", "", 2),
    Run("quantized", "quantized", "--layers 4 --rounds 3", "", 2),
    Run("balance", "balance", "--steps 1", "--steps 4"),
    Run("predictions", "predictions", "--rounds 1 --small", "--rounds 3"),
    Run("one_gpu", "one_gpu", gpu=True),
    Run("one_gpu_small", "one_gpu", _SHORT_KERNELS, _SHORT_KERNELS, gpu=True),
    Run("one_gpu_ops", "one_gpu_ops", gpu=True),
    Run("one_gpu_families", "one_gpu_families", gpu=True),
    Run("scale", "scale", "--rounds 1 --small", "--rounds 3"),
    Run("many_ranks", "many_ranks", "--small", ""),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[run.name for run in RUNS])
    parser.add_argument("--results", type=Path, help="the folder of the records (default: by the form, as above)")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    options = parser.parse_args(arguments)
    folder = options.results or (RESULTS if options.full else SHORT)
    chosen = [run for run in RUNS if not options.only or run.name in options.only]
    if options.list:
        for run in chosen:
            print(" ".join(run.command(options.full, folder)))
        return 0
    return _run_all(chosen, options.full, folder)


def _run_all(runs: list[Run], full: bool, folder: Path) -> int:
    """Run each, print a line for each, and say at the end what failed and what was left out."""
    no_link, no_gpu = _why_no_link(), "" if torch.cuda.is_available() else "there is no GPU"
    failed: list[str] = []
    began = time.monotonic()
    for run in runs:
        reason = no_gpu if run.gpu else no_link if run.rate or run.emulates else ""
        if reason:
            print(f"{run.name:<26} left out: {reason}", flush=True)
            continue
        seconds, error = _run(run, full, folder)
        print(f"{run.name:<26} {seconds:6.1f} s  {'failed' if error else 'ok'}", flush=True)
        if error:
            failed.append(run.name)
            print(error, file=sys.stderr, flush=True)
    writes_tables = "; `python -m benchmarks.measurements` writes the tables" if folder == RESULTS else ""
    print(f"{time.monotonic() - began:.0f} s; records in {folder}{writes_tables}")
    return 1 if failed else 0


def _run(run: Run, full: bool, folder: Path) -> tuple[float, str]:
    """(seconds, the end of its error output; empty: it succeeded)."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            run.command(full, folder), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return time.monotonic() - began, f"still running after {TIMEOUT_S:.0f} s"
    error = "\n".join(done.stderr.splitlines()[-15:]) or f"exit status {done.returncode}"
    return time.monotonic() - began, error if done.returncode else ""


def _why_no_link() -> str:
    try:
        check()
    except EmulationError as reason:
        return str(reason)
    return ""


if __name__ == "__main__":
    sys.exit(main())
