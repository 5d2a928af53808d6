"""ZeRO stages against PyTorch's own, used by hand, on the same work in one run: step time and memory.

    torchrun --nproc-per-node 2 -m benchmarks.zero
    torchrun --nproc-per-node 4 -m benchmarks.zero --table   # bytes of parameters, gradients, state; and the arithmetic
    python -m benchmarks.zero --memory            # peak resident memory, each contender in fresh processes

| stage | against |
|---|---|
| 0 | DistributedDataParallel |
| 1 | DistributedDataParallel with ZeroRedundancyOptimizer |
| 2 | fully_shard that keeps parameters after forward |
| 3 | fully_shard |
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.llama import Llama
from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import build_mesh, build_optimizer, bytes_per_rank, destroy_groups, shard_data

RANKS = 2 if "--memory" in sys.argv else 0
PEERS = {0: "ddp", 1: "ddp + ZeroRedundancyOptimizer", 2: "fully_shard, kept", 3: "fully_shard"}
Step = Callable[[], object]


def model_of(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return Llama(args.hidden, args.layers, args.heads, args.vocab)


def step_of(model: Any, optimizer: Any, args: argparse.Namespace, world: int) -> Step:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, args.vocab, (args.batch, args.length), generator=generator)
    total = ids.numel() * world

    def step() -> None:
        logits = model(ids)
        F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum").div(total).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(zero: int, args: argparse.Namespace) -> tuple[nn.Module, Step]:
    model = model_of(args)
    mesh = build_mesh("cpu", dp=dist.get_world_size())
    shard_data(model, mesh, zero, units=["layers.*"] if zero == 3 else None)
    optimizer = build_optimizer(model, torch.optim.AdamW, lr=1e-4, foreach=True)
    return model, step_of(model, optimizer, args, dist.get_world_size())


def theirs(zero: int, args: argparse.Namespace) -> tuple[nn.Module, Step]:
    model, world = model_of(args), dist.get_world_size()
    options = {"lr": 1e-4, "foreach": True}
    if zero <= 1:
        wrapped = DistributedDataParallel(model)
        if zero == 0:
            optimizer: Any = torch.optim.AdamW(model.parameters(), **options)
        else:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
        return model, step_of(wrapped, optimizer, args, 1)  # DDP averages
    mesh = build_mesh("cpu", dp=world)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=zero == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=zero == 3)
    return model, step_of(model, torch.optim.AdamW(model.parameters(), **options), args, 1)


def times(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    for zero in args.stages:
        (our_model, run_ours), (their_model, run_theirs) = ours(zero, args), theirs(zero, args)
        run_ours()
        run_theirs()
        pairs = zip(our_model.parameters(), their_model.parameters(), strict=True)
        for a, b in pairs:
            a, b = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (a, b))
            assert float((a - b).detach().abs().max()) < 5e-4, "the two do not compute the same step"
        measured = interleaved({"ours": run_ours, "pytorch": run_theirs}, args.rounds, before=dist.barrier)
        result = {"stage": zero, "against": PEERS[zero], **medians_ms(measured)}
        results.append({**result, "ratio": ratio(measured, "ours", "pytorch")})
        if dist.get_rank() == 0:
            r = results[-1]["ratio"]
            print(
                f"ZeRO {zero}: ours {result['ours']:7.1f} ms  {PEERS[zero]} {result['pytorch']:7.1f} ms  "
                f"ratio {r['median']:.3f} [{r['low']:.3f}, {r['high']:.3f}]",
                flush=True,
            )
    return results


def storage_bytes(tensors: Any) -> int:
    """Bytes of the storages of tensors, each counted once."""
    plain = [x.to_local() if hasattr(x, "to_local") else x for x in tensors if x is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in plain}.values())


def table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The bytes that a rank stores after two AdamW steps, measured and predicted by `bytes_per_rank`."""
    results = []
    for dtype in (None, torch.bfloat16):
        for zero in args.stages:
            model, mesh = model_of(args), build_mesh("cpu", dp=dist.get_world_size())
            shard_data(model, mesh, zero, dtype=dtype, units=["layers.*"] if zero == 3 else None)
            optimizer = build_optimizer(model, torch.optim.AdamW, lr=1e-4)
            ids = torch.randint(0, args.vocab, (1, 8))
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
                optimizer.step()
            params = list(model.parameters())
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            masters = stepped if dtype is not None and zero < 3 else []
            state = [v for values in optimizer.state.values() for v in values.values() if v.ndim]
            measured = {
                "parameters": storage_bytes(params),
                "gradients": storage_bytes(p.grad for p in params),
                "optimizer": storage_bytes([*masters, *state]),
            }
            predicted = bytes_per_rank(model, zero, mesh, mixed=dtype is not None)
            results.append(
                {"stage": zero, "dtype": str(dtype or torch.float32), "measured": measured, "arithmetic": predicted}
            )
            if dist.get_rank() == 0:
                name = "bfloat16" if dtype is not None else "float32"
                cells = "  ".join(f"{measured[key] / 2**20:8.2f} ({predicted[key] / 2**20:.2f})" for key in measured)
                print(f"{name:<9} ZeRO {zero}  {cells}  together {sum(measured.values()) / 2**20:.2f} MiB", flush=True)
    return results


def peak(args: argparse.Namespace) -> None:
    """Print by how many MiB this process's peak memory grows after it starts to build the model."""
    torch.randn(256, 256) @ torch.randn(256, 256)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, step = (ours if args.only == "ours" else theirs)(args.stages[0], args)
    for _ in range(3):
        step()
    rise = torch.tensor((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    dist.all_reduce(rise, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"peak {float(rise):.1f}", flush=True)


def memory(args: argparse.Namespace, command_line: list[str]) -> list[dict[str, Any]]:
    results = []
    for zero in args.stages:
        peaks: dict[str, list[float]] = {"ours": [], "pytorch": []}
        for only in ("ours", "pytorch") * args.repeats:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["-m", "benchmarks.zero", *command_line, "--only", only, "--stages", str(zero)]
            out = subprocess.run(command, capture_output=True, text=True, timeout=300)
            lines = [line for line in out.stdout.splitlines() if line.startswith("peak")]
            if not lines:
                raise SystemExit(out.stderr[-2000:])
            peaks[only].append(float(lines[0].split()[1]))
        rises = {only: statistics.median(values) for only, values in peaks.items()}
        memory_ratio = rises["ours"] / rises["pytorch"]
        results.append(
            {
                "stage": zero,
                "against": PEERS[zero],
                "ours_mib": rises["ours"],
                "pytorch_mib": rises["pytorch"],
                "ratio": memory_ratio,
            }
        )
        print(
            f"ZeRO {zero}: ours {rises['ours']:7.1f} MiB  {PEERS[zero]} {rises['pytorch']:7.1f} MiB  ratio "
            f"{memory_ratio:.3f}",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("heads", 8), ("layers", 6), ("vocab", 1024), ("batch", 2), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--repeats", type=int, default=3, help="of each contender, with --memory")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", choices=["ours", "pytorch"], help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.memory and args.only is None:
        sizes = [
            f"--{name}={getattr(args, name)}" for name in ("hidden", "heads", "layers", "vocab", "batch", "length")
        ]
        results = memory(args, [*sizes, "--memory"])
    else:
        join()
        if args.only is not None:
            peak(args)
            destroy_groups()
            return
        results = table(args) if args.table else times(args)
    if args.memory or dist.get_rank() == 0:
        write_record(args.json, {"ranks": RANKS or dist.get_world_size(), "results": results})
    if dist.is_initialized():
        destroy_groups()


if __name__ == "__main__":
    main()
