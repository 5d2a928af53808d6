"""Saving and loading a training state: this package, PyTorch's distributed checkpoint, plain safetensors; in one run.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.checkpoint

All save the same state: a model sharded over tp, and AdamW's state. Every save is flushed to the disk. Before each
timing, pending writes are flushed (`sync`) and the ranks synchronize. Loads read the files from the page cache.
PyTorch's checkpoint and plain safetensors have no hashes; this package always writes them, and compares them unless
`check=False`.

The last table loads a checkpoint of nodes without a shared folder, of one rank each: where it was saved, and with the
folders exchanged, so that each rank receives everything from another one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from benchmarks.llama import Llama, plan
from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import (
    Checkpointer,
    build_mesh,
    destroy_groups,
    load_checkpoint,
    local_optimizer,
    parallelize_module,
)

Work = dict[str, Callable[[], object]]
PAIRS = [
    ("ours", "safetensors", 1.3),
    ("ours", "pytorch", None),
    ("ours in the background", "ours", None),
]
LOAD_PAIRS = [
    ("ours, checked", "pytorch", 1.0),
    ("ours, unchecked", "pytorch", 0.5),
    ("ours, checked", "safetensors", None),
]


NODE_PAIRS = [("own node", "shared", None), ("other node", "shared", None), ("other node, unchecked", "shared", None)]


class State:
    """A model sharded over tp and its optimizer, after one step."""

    def __init__(self, args: argparse.Namespace):
        mesh = build_mesh("cpu", tp=dist.get_world_size())
        self.model = parallelize_module(Llama(args.hidden, args.layers, 8, args.vocab), mesh, plan(8))
        self.optimizer = local_optimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-4))
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and optimizer states by name, as DTensors and step counts."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        by_name: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        for parameter, state in self.optimizer.state.items():
            by_name |= {f"optimizer.{names[id(parameter)]}.{key}": value for key, value in state.items()}
        return {name: value.detach() for name, value in by_name.items()}

    def local(self) -> dict[str, torch.Tensor]:
        return {n: v.to_local() if isinstance(v, DTensor) else v for n, v in self.tensors().items()}


def flushed(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write plain safetensors, and flush them to the disk."""
    save_file(tensors, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def copied(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Read plain safetensors into existing tensors."""
    for name, value in load_file(path).items():
        tensors[name].copy_(value)


class Disk:
    """A folder for each save, deleted before the next."""

    def __init__(self, root: Path):
        self.root, self.turn = root, 0

    def quiet(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            old = [path for run in ("a", "b") for path in sorted((self.root / run).glob("step-*"))[:-1]]
            for path in [*self.root.glob("gone-*"), *old]:
                shutil.rmtree(path)
            os.sync()
        dist.barrier()

    def new(self) -> Path:
        self.turn += 1
        return self.root / f"gone-{self.turn}"


def saves(state: State, disk: Disk, checkpoints: Checkpointer, background_checkpoints: Checkpointer) -> Work:
    steps = iter(range(1, 1 << 30))

    def plain() -> None:
        path = disk.new()
        path.mkdir(exist_ok=True)
        flushed(state.local(), path / f"{dist.get_rank()}.safetensors")
        dist.barrier()

    def background() -> None:
        background_checkpoints.save(next(steps))

    return {
        "ours": lambda: checkpoints.save(next(steps)),
        "pytorch": lambda: dcp.save(state.tensors(), checkpoint_id=disk.new()),
        "safetensors": plain,
        "ours in the background": background,
    }


def loads(state: State, root: Path, checkpoints: Checkpointer) -> Work:
    local = state.local()
    flushed(local, root / f"{dist.get_rank()}.safetensors")
    dcp.save(state.tensors(), checkpoint_id=root / "pytorch")

    def pytorch() -> None:
        dcp.load(state.tensors(), checkpoint_id=root / "pytorch")

    return {
        "ours, checked": checkpoints.resume,
        "ours, unchecked": lambda: checkpoints.resume(check=False),
        "pytorch": pytorch,
        "safetensors": lambda: copied(root / f"{dist.get_rank()}.safetensors", local),
    }


def node_loads(state: State, root: Path, checkpoints: Checkpointer) -> Work:
    """Loads of the same state from a shared folder, from the folder of the own node, and from that of another."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, other = root / f"node-{rank}", root / f"node-{(rank + 1) % ranks}"
    with Checkpointer(own, state.model, optimizer=state.optimizer, shared=False) as of_node:
        of_node.save(1)
    load = partial(load_checkpoint, model=state.model, optimizer=state.optimizer, shared=False)
    return {
        "shared": checkpoints.resume,
        "own node": lambda: load(own),
        "other node": lambda: load(other),
        "other node, unchecked": lambda: load(other, check=False),
    }


def report(title: str, times: dict[str, list[float]], pairs: list, num_bytes: int) -> dict[str, Any]:
    medians = medians_ms(times)
    ratios = {f"{top} / {bottom}": ratio(times, top, bottom) | {"bound": bound} for top, bottom, bound in pairs}
    if dist.get_rank() == 0:
        print(f"\n{title}, {num_bytes / 1e6:.0f} MB a rank")
        for name, ms in medians.items():
            print(f"  {name:<24} {ms:8.1f} ms  {num_bytes / ms / 1e6:6.2f} GB/s a rank")
        for name, value in ratios.items():
            bound = f"  (bound {value['bound']})" if value["bound"] else ""
            print(f"  {name:<40} {value['median']:.3f} [{value['low']:.3f}, {value['high']:.3f}]{bound}")
    return {"ms": medians, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 768), ("layers", 8), ("vocab", 2048), ("rounds", 11)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    join()
    state = State(args)
    folders: list[Any] = [tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    root = Path(folders[0])
    num_bytes = sum(value.numel() * value.element_size() for value in state.local().values())
    options: dict[str, Any] = {"optimizer": state.optimizer}
    disk = Disk(root)
    try:
        with (
            Checkpointer(root / "a", state.model, **options) as checkpoints,
            Checkpointer(root / "b", state.model, asynchronous=True, **options) as background_checkpoints,
        ):

            def quiet() -> None:
                background_checkpoints.wait()
                disk.quiet()

            times = interleaved(saves(state, disk, checkpoints, background_checkpoints), args.rounds, before=quiet)
            results = {"save": report("save", times, PAIRS, num_bytes)}
            background_checkpoints.wait()
            times = interleaved(loads(state, root, checkpoints), args.rounds, before=disk.quiet)
            results["load"] = report("load", times, LOAD_PAIRS, num_bytes)
            times = interleaved(node_loads(state, root, checkpoints), args.rounds, before=disk.quiet)
            results["nodes"] = report("load, of nodes", times, NODE_PAIRS, num_bytes)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(root, ignore_errors=True)
    if dist.get_rank() == 0:
        write_record(args.json, {"ranks": dist.get_world_size(), "bytes_per_rank": num_bytes} | results)
    destroy_groups()


if __name__ == "__main__":
    main()
