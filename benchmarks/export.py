"""Weights of a tensor-parallel model as full tensors on every rank, in buckets, against gathering tensor by tensor.

    torchrun --nproc-per-node 2 -m benchmarks.export

A module with 1,000 weights over tp 2. Contenders are interleaved, and give the same tensors, which is checked.

| contender | |
|---|---|
| tensor by tensor | `full_tensor()` of each parameter, one after the other |
| buckets | `WeightExporter.export()`, built once |
| export_weights | `export_weights()`, when the model has been exported before |
| export_weights, first call | the same of a model that has not been: it compares what each rank stores |
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import WeightExporter, build_mesh, destroy_groups, export_weights, parallelize_module
from parallelize.state.records import mark_applied

BY_TENSOR, BUCKETS, AGAIN, FIRST = "tensor by tensor", "buckets", "export_weights", "export_weights, first call"


class Pair(nn.Module):
    """A column linear and a row linear."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def model_of(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Pair(args.hidden) for _ in range(args.tensors // 2)))
    return parallelize_module(
        model, build_mesh("cpu", tp=dist.get_world_size()), {"*.up": "colwise", "*.down": "rowwise"}
    )


def contenders(model: nn.Module, args: argparse.Namespace) -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    """Each returns name -> full tensor: all of them, so that memory is that of the model."""
    exporter = WeightExporter(model, bucket=args.bucket)

    def by_tensor() -> dict[str, torch.Tensor]:
        return {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}

    def buckets() -> dict[str, torch.Tensor]:
        return {name: tensor for bucket in exporter.export() for name, tensor in bucket.tensors.items()}

    def again() -> dict[str, torch.Tensor]:
        return {n: t for bucket in export_weights(model, bucket=args.bucket) for n, t in bucket.tensors.items()}

    def first() -> dict[str, torch.Tensor]:
        mark_applied(model, exporters=None)
        return again()

    return {BY_TENSOR: by_tensor, BUCKETS: buckets, FIRST: first, AGAIN: again}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--bucket", default="512MB")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    join()
    model = model_of(args)
    work = contenders(model, args)
    first = work[BY_TENSOR]()
    for run in work.values():
        tensors = run()
        assert tensors.keys() == first.keys() and all(torch.equal(tensors[name], first[name]) for name in first)
    times = interleaved(work, args.rounds, before=dist.barrier)
    if dist.get_rank() == 0:
        ratios = {name: ratio(times, BY_TENSOR, name) for name in (BUCKETS, AGAIN, FIRST)}
        for name, milliseconds in medians_ms(times).items():
            faster = f"  {ratios[name]['median']:.1f} times faster" if name in ratios else ""
            print(f"{name:<28} {milliseconds:8.1f} ms{faster}", flush=True)
        sizes = {"tensors": args.tensors, "hidden": args.hidden, "bucket": args.bucket}
        write_record(args.json, {**sizes, "ms": medians_ms(times), "ratios": ratios})
    destroy_groups()


if __name__ == "__main__":
    main()
