"""How long checks before a launch take: whole commands in fresh processes, imports included, with their peak memory.

    python -m benchmarks.predictions [--rounds 3]

| command | limit |
|---|---|
| `parallelize explain` of Llama 3 8B on 64 ranks, 70B on 1,024, 405B on 16,384, with advice | 5, 15, 30 s; 1.5 GB |
| the same of Qwen3 235B and DeepSeek V3 on 1,024 ranks, experts over 64 of them | 15 s; 1.5 GB |
| `parallelize verify` of a two-layer Llama on tp 8, three modes | 10 s |
| `parallelize lint` of a plan file alone; against Llama 3 8B on tp 8 | - |
| `parallelize fit` of Llama 3 8B on 8 GPUs | - |
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.record import write_record

BF16 = ["--dtype", "bfloat16", "--zero", "1", "--sequence-parallel", "--loss-parallel", "--sequence", "8192"]
INTERLEAVED = ["--schedule", "interleaved_1f1b", "--stages-per-rank", "7"]
OVER_1024 = ["--mesh", "pp=4,dp=32,tp=8", "--batch", "16", "--num-microbatches", "16"]
COMMANDS = [
    ("explain llama-3-8b, 64 ranks", ["explain", "llama-3-8b", "--mesh", "dp=8,tp=8", *BF16], 5.0),
    (
        "explain llama-3-70b, 1,024 ranks",
        ["explain", "llama-3-70b", *OVER_1024, *BF16],
        15.0,
    ),
    (
        "explain llama-3.1-405b, 16,384 ranks",
        [
            *("explain", "llama-3.1-405b", "--mesh", "pp=16,dp=128,tp=8", "--batch", "32", "--num-microbatches", "32"),
            *(*INTERLEAVED, *BF16),
        ],
        30.0,
    ),
    *(
        (f"explain {name}, 1,024 ranks, ep=64", ["explain", name, *OVER_1024, "--ep", "64", *BF16], 15.0)
        for name in ("qwen3-235b-a22b", "deepseek-v3")
    ),
    ("verify llama, tp=8, three modes", ["verify", "llama-3-8b", "--mesh", "tp=8"], 10.0),
    ("lint llama.yaml", ["lint", "llama"], None),
    ("lint llama.yaml against llama-3-8b, tp=8", ["lint", "llama", "--model", "llama-3-8b", "--mesh", "tp=8"], None),
    ("fit llama-3-8b on 8 GPUs", ["fit", "llama-3-8b", "--gpus", "8", "--global-batch", "32"], None),
]

SMALL = [name for name, command, _ in COMMANDS if command[0] != "fit" and ",0" not in name and "16,384" not in name]
"""Of models of at most 8B, and quick."""


def run(command: list[str]) -> tuple[float, float]:
    """(seconds, peak memory in MB) of one process."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "parallelize", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    error = process.stderr.read() if process.stderr is not None else b""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{error.decode()}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="without models of more than 8B, and without `fit`")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    commands = [row for row in COMMANDS if not args.small or row[0] in SMALL]
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in commands}
    for _ in range(args.rounds):
        for name, command, _ in commands:
            runs[name].append(run(command))
    width = max(map(len, runs))
    results = {}
    print(f"{'':<{width}}  seconds  limit  peak MB")
    for name, _, limit in commands:
        seconds = statistics.median(value for value, _ in runs[name])
        memory = max(value for _, value in runs[name])
        results[name] = {
            "seconds": seconds,
            "all": [value for value, _ in runs[name]],
            "limit_s": limit,
            "peak_mb": memory,
        }
        print(f"{name:<{width}}  {seconds:7.2f}  {limit or '-':>5}  {memory:7.0f}")
    write_record(args.json, results)


if __name__ == "__main__":
    main()
