"""Head and loss in one against `F.linear` and `F.cross_entropy`: time and peak memory of forward and backward.

    python -m benchmarks.fused_loss                                 # one rank
    torchrun --nproc-per-node 2 -m benchmarks.fused_loss            # vocabulary over two ranks (gloo)

Time: interleaved rounds, medians of ratios within a round with a 95% interval. Memory: the peak of the storages that
    ops
allocate, gradients included, inputs excluded; as a check, also the growth of the resident set of a fresh process.
Unfused and sharded is the same matmul with the loss on sharded logits (`loss_parallel`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from benchmarks.memory import peak_bytes
from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import build_mesh, cross_entropy, destroy_groups, linear_cross_entropy
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.ops.vocabulary.class_targets import Vocabulary

VOCABULARY = 32768
LARGER = ((4096, 1024, "float32"), (8192, 2048, "bfloat16"), (16384, 4096, "bfloat16"))


def variants(
    tokens: int, hidden_size: int, dtype: torch.dtype, tp: int, device: str = "cpu"
) -> dict[str, Callable[[], object]]:
    """name -> one forward and backward of head and mean loss, from the same tensors."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, dtype=dtype, device=device).requires_grad_()
    weight = (torch.randn(VOCABULARY, hidden_size, device=device) * hidden_size**-0.5).to(dtype)
    targets = torch.randint(0, VOCABULARY, (tokens,), device=device)
    mesh = build_mesh("cpu", tp=tp) if tp > 1 else None
    parameter = weight.requires_grad_()
    local, group = parameter, Group.alone()
    if mesh is not None:
        group = Group(mesh.get_group())
        local = weight.detach().chunk(tp)[group.rank].clone().requires_grad_()
        parameter = DTensor.from_local(local.detach(), mesh, [Shard(0)], run_check=False).requires_grad_()
    vocabulary = Vocabulary(VOCABULARY, group)

    def forget() -> None:
        hidden.grad = local.grad = parameter.grad = None

    def unfused() -> None:
        forget()
        if mesh is None:
            F.cross_entropy(F.linear(hidden, local).float(), targets).backward()  # as the losses of `transformers` do
        else:
            cross_entropy(mark(F.linear(ops.copy(hidden, group), local), vocabulary), targets).backward()

    def fused() -> None:
        forget()
        linear_cross_entropy(hidden, parameter, targets).backward()

    def fused_by_token() -> None:
        forget()
        linear_cross_entropy(hidden, parameter, targets, reduction="none").sum().backward()

    return {"unfused": unfused, "fused": fused, "fused, none": fused_by_token}


def resident(name: str, tokens: int, hidden_size: int, dtype: str) -> int:
    """Bytes by which the largest resident set of a fresh process grows in one forward and backward."""
    command = [sys.executable, "-m", "benchmarks.fused_loss", "--resident", name]
    command += ["--tokens", str(tokens), "--hidden", str(hidden_size), "--dtype", dtype]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)


def largest_resident() -> int:
    """Bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measure(tokens: int, hidden_size: int, dtype: str, rounds: int, tp: int) -> dict:
    work = variants(tokens, hidden_size, getattr(torch, dtype), tp)
    before = dist.barrier if tp > 1 else None
    times = interleaved(work, rounds, before=before)
    peaks = {name: peak_bytes(run) for name, run in work.items()}
    result = {
        "tokens": tokens,
        "hidden": hidden_size,
        "vocabulary": VOCABULARY,
        "dtype": dtype,
        "tp": tp,
        "ms": medians_ms(times),
        "time_ratio": {name: ratio(times, name, "unfused") for name in work if name != "unfused"},
        "peak_mib": {name: peak / 2**20 for name, peak in peaks.items()},
        "memory_ratio": {name: peak / peaks["unfused"] for name, peak in peaks.items() if name != "unfused"},
    }
    if tp == 1:
        grown = {name: resident(name, tokens, hidden_size, dtype) for name in work}
        result["resident_mib"] = {name: size / 2**20 for name, size in grown.items()}
        result["resident_ratio"] = {name: size / grown["unfused"] for name, size in grown.items() if name != "unfused"}
    return result


def predicted(tokens: int, hidden_size: int, dtype: str) -> dict:
    """Peak memory of larger sizes: the same code on meta tensors."""
    work = variants(tokens, hidden_size, getattr(torch, dtype), 1, "meta")
    peaks = {name: peak_bytes(run) for name, run in work.items()}
    setting = {"tokens": tokens, "hidden": hidden_size, "vocabulary": VOCABULARY, "dtype": dtype, "tp": 1}
    ratios = {name: peak / peaks["unfused"] for name, peak in peaks.items() if name != "unfused"}
    return setting | {"peak_mib": {name: peak / 2**20 for name, peak in peaks.items()}, "memory_ratio": ratios}


def show(result: dict) -> None:
    setting = f"{result['tokens']} tokens, hidden {result['hidden']}, {result['dtype']}, tp {result['tp']}"
    for name, peak in result["peak_mib"].items():
        line = f"{setting:<46}  {name:<12}  {peak:8.1f} MiB"
        line += f"  {result['ms'][name]:9.1f} ms" if "ms" in result else ""
        if name != "unfused":
            line += f"  memory {result['memory_ratio'][name]:.3f}"
            line += f"  resident {result['resident_ratio'][name]:.3f}" if "resident_ratio" in result else ""
        if name != "unfused" and "time_ratio" in result:
            took = result["time_ratio"][name]
            line += f"  time {took['median']:.3f} [{took['low']:.3f}, {took['high']:.3f}]"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resident", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.resident is not None:
        run = variants(args.tokens, args.hidden, getattr(torch, args.dtype), 1)[args.resident]
        Path("/proc/self/clear_refs").write_text("5")  # the largest so far counts from here
        before = largest_resident()
        run()
        print(largest_resident() - before)
        return
    tp = 1
    if "WORLD_SIZE" in os.environ:
        join()
        tp = dist.get_world_size()
    results = [measure(args.tokens, args.hidden, args.dtype, args.rounds, tp)]
    if tp == 1:
        results += [predicted(*size) for size in LARGER]
    if tp == 1 or dist.get_rank() == 0:
        for result in results:
            show(result)
        write_record(args.json, results)
    if tp > 1:
        destroy_groups()


if __name__ == "__main__":
    main()
