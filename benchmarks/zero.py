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
import json
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
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import build_mesh, build_optimizer, bytes_per_rank, destroy_groups, shard_data

RANKS = 2 if "--memory" in sys.argv else 0
PEERS = {0: "ddp", 1: "ddp + ZeroRedundancyOptimizer", 2: "fully_shard, kept", 3: "fully_shard"}
Step = Callable[[], object]


def model_of(given: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return Llama(given.hidden, given.layers, given.heads, given.vocab)


def step_of(model: Any, optimizer: Any, given: argparse.Namespace, world: int) -> Step:
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, given.vocab, (given.batch, given.length), generator=generator)
    total = ids.numel() * world

    def step() -> None:
        logits = model(ids)
        F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum").div(total).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(zero: int, given: argparse.Namespace) -> tuple[nn.Module, Step]:
    model = model_of(given)
    mesh = build_mesh("cpu", dp=dist.get_world_size())
    shard_data(model, mesh, zero, units=["layers.*"] if zero == 3 else None)
    optimizer = build_optimizer(model, torch.optim.AdamW, lr=1e-4, foreach=True)
    return model, step_of(model, optimizer, given, dist.get_world_size())


def theirs(zero: int, given: argparse.Namespace) -> tuple[nn.Module, Step]:
    model, world = model_of(given), dist.get_world_size()
    options = {"lr": 1e-4, "foreach": True}
    if zero <= 1:
        wrapped = DistributedDataParallel(model)
        if zero == 0:
            optimizer: Any = torch.optim.AdamW(model.parameters(), **options)
        else:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
        return model, step_of(wrapped, optimizer, given, 1)  # DDP averages
    mesh = build_mesh("cpu", dp=world)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=zero == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=zero == 3)
    return model, step_of(model, torch.optim.AdamW(model.parameters(), **options), given, 1)


def times(given: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for zero in given.stages:
        (mine, run_ours), (other, run_theirs) = ours(zero, given), theirs(zero, given)
        run_ours()
        run_theirs()
        pairs = zip(mine.parameters(), other.parameters(), strict=True)
        for a, b in pairs:
            a, b = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (a, b))
            assert float((a - b).detach().abs().max()) < 5e-4, "the two do not compute the same step"
        measured = interleaved({"ours": run_ours, "pytorch": run_theirs}, given.rounds, before=dist.barrier)
        result = {"stage": zero, "against": PEERS[zero], **medians_ms(measured)}
        found.append({**result, "ratio": ratio(measured, "ours", "pytorch")})
        if dist.get_rank() == 0:
            r = found[-1]["ratio"]
            print(
                f"ZeRO {zero}: ours {result['ours']:7.1f} ms  {PEERS[zero]} {result['pytorch']:7.1f} ms  "
                f"ratio {r['median']:.3f} [{r['low']:.3f}, {r['high']:.3f}]",
                flush=True,
            )
    return found


def held(tensors: Any) -> int:
    """Bytes of storages, each counted once."""
    plain = [x.to_local() if hasattr(x, "to_local") else x for x in tensors if x is not None]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in plain}.values())


def table(given: argparse.Namespace) -> list[dict[str, Any]]:
    """What a rank holds after two AdamW steps, measured, and by `bytes_per_rank`."""
    found = []
    for dtype in (None, torch.bfloat16):
        for zero in given.stages:
            model, mesh = model_of(given), build_mesh("cpu", dp=dist.get_world_size())
            shard_data(model, mesh, zero, dtype=dtype, units=["layers.*"] if zero == 3 else None)
            optimizer = build_optimizer(model, torch.optim.AdamW, lr=1e-4)
            ids = torch.randint(0, given.vocab, (1, 8))
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
                optimizer.step()
            params = list(model.parameters())
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            masters = stepped if dtype is not None and zero < 3 else []
            state = [v for one in optimizer.state.values() for v in one.values() if v.ndim]
            measured = {
                "parameters": held(params),
                "gradients": held(p.grad for p in params),
                "optimizer": held([*masters, *state]),
            }
            wanted = bytes_per_rank(model, zero, mesh, mixed=dtype is not None)
            found.append(
                {"stage": zero, "dtype": str(dtype or torch.float32), "measured": measured, "arithmetic": wanted}
            )
            if dist.get_rank() == 0:
                name = "bfloat16" if dtype is not None else "float32"
                cells = "  ".join(f"{measured[key] / 2**20:8.2f} ({wanted[key] / 2**20:.2f})" for key in measured)
                print(f"{name:<9} ZeRO {zero}  {cells}  together {sum(measured.values()) / 2**20:.2f} MiB", flush=True)
    return found


def peak(given: argparse.Namespace) -> None:
    """Print how far this process's peak memory rises over what it needs before the model is built, in MiB."""
    torch.randn(256, 256) @ torch.randn(256, 256)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, step = (ours if given.only == "ours" else theirs)(given.stages[0], given)
    for _ in range(3):
        step()
    rise = torch.tensor((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    dist.all_reduce(rise, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"peak {float(rise):.1f}", flush=True)


def memory(given: argparse.Namespace, arguments: list[str]) -> list[dict[str, Any]]:
    found = []
    for zero in given.stages:
        each: dict[str, list[float]] = {"ours": [], "pytorch": []}
        for only in ("ours", "pytorch") * given.repeats:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["-m", "benchmarks.zero", *arguments, "--only", only, "--stages", str(zero)]
            out = subprocess.run(command, capture_output=True, text=True, timeout=300)
            lines = [line for line in out.stdout.splitlines() if line.startswith("peak")]
            if not lines:
                raise SystemExit(out.stderr[-2000:])
            each[only].append(float(lines[0].split()[1]))
        rises = {only: statistics.median(values) for only, values in each.items()}
        share = rises["ours"] / rises["pytorch"]
        found.append(
            {
                "stage": zero,
                "against": PEERS[zero],
                "ours_mib": rises["ours"],
                "pytorch_mib": rises["pytorch"],
                "ratio": share,
            }
        )
        print(
            f"ZeRO {zero}: ours {rises['ours']:7.1f} MiB  {PEERS[zero]} {rises['pytorch']:7.1f} MiB  ratio {share:.3f}",
            flush=True,
        )
    return found


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
    given = parser.parse_args()
    if given.memory and given.only is None:
        kept = [
            f"--{name}={getattr(given, name)}" for name in ("hidden", "heads", "layers", "vocab", "batch", "length")
        ]
        found = memory(given, [*kept, "--memory"])
    else:
        join()
        if given.only is not None:
            peak(given)
            destroy_groups()
            return
        found = table(given) if given.table else times(given)
    if given.json is not None and (given.memory or dist.get_rank() == 0):
        given.json.write_text(
            json.dumps(
                {"torch": torch.__version__, "ranks": RANKS or dist.get_world_size(), "results": found}, indent=1
            )
            + "\n"
        )
    if dist.is_initialized():
        destroy_groups()


if __name__ == "__main__":
    main()
