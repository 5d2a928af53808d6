"""Ring attention over the ranks against one rank with the full sequence, forward and backward, for each dtype and mask.

    torchrun --nproc-per-node 2 -m benchmarks.ring_attention
    sudo python -m benchmarks.slow_link --rate 1gbit -- -m benchmarks.ring_attention

"one rank" is PyTorch's `scaled_dot_product_attention` as stock models call it: `is_causal` where it can, else with a
mask that has an element for each pair of tokens. Every rank computes it at the same time. Errors are those of outputs
and gradients in float32 from attention in float64, of both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import build_mesh, destroy_groups
from parallelize.axes.context.sequence_shards import SequenceLayout
from parallelize.comm.groups import Group
from parallelize.ops.attention.ring_attention import Masking, ring_attention

T = torch.Tensor
MASKS = ("causal", "full", "window", "packed")
Work = Callable[[], tuple[T, ...]]


class Case:
    """Attention with one dtype and mask: inputs of the full sequence, equal on all ranks."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype, mask: str, length: int):
        generator = torch.Generator().manual_seed(0)
        shapes = [(1, heads, length, args.width) for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)]
        self.q, self.k, self.v, self.grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        window = length // 8 if mask == "window" else 0
        self.masking = Masking(mask != "full", window, args.width**-0.5)
        documents = torch.arange(length).unsqueeze(0) // (length // 4)
        self.documents = documents if mask == "packed" else None

    def of_one_rank(self) -> Work:
        q, k, v = (x.clone().requires_grad_() for x in (self.q, self.k, self.v))
        mask, causal = self._mask(), self.masking.causal

        def work() -> tuple[T, ...]:
            is_causal = causal and mask is None
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)
            return out, *torch.autograd.grad(out, (q, k, v), self.grad)

        return work

    def over_ranks(self, group: Group) -> tuple[Work, T]:
        """The work of this rank, and the positions of its tokens."""
        layout = SequenceLayout(self.q.shape[2], group.size, 1, balanced=self.masking.causal)
        runs = tuple(layout.of_ring_rank(rank) for rank in range(group.size))
        positions = torch.cat([torch.arange(*run) for run in runs[group.rank]])
        q, k, v, grad = (x[:, :, positions].contiguous() for x in (self.q, self.k, self.v, self.grad))
        q, k, v = (x.requires_grad_() for x in (q, k, v))

        def work() -> tuple[T, ...]:
            out = ring_attention(q, k, v, group, runs, self.masking, self.documents)
            return out, *torch.autograd.grad(out, (q, k, v), grad)

        return work, positions

    def _mask(self) -> T | None:
        """[1, 1, tokens, tokens], of windows and documents."""
        if not self.masking.window and self.documents is None:
            return None
        positions = torch.arange(self.q.shape[2])
        distance = positions.unsqueeze(1) - positions
        visible = distance >= 0
        if self.masking.window:
            visible &= distance < self.masking.window
        if self.documents is not None:
            visible &= self.documents.view(-1, 1) == self.documents.view(1, -1)
        return visible.view(1, 1, *visible.shape)


def error(actual: tuple[T, ...], expected: tuple[T, ...], positions: T) -> float:
    """The largest relative error of any of these tensors, at these positions."""
    pairs = zip(actual, expected, strict=True)
    return max(
        float((a.detach().double() - b.detach()[:, :, positions]).abs().max() / b.detach().abs().max())
        for a, b in pairs
    )


def accuracy(args: argparse.Namespace, mask: str, group: Group) -> dict[str, float]:
    """In float32, errors of this rank's part, for both."""
    single, double = (Case(args, dtype, mask, args.length // 8) for dtype in (torch.float32, torch.float64))
    double.q, double.k, double.v, double.grad = (x.double() for x in (single.q, single.k, single.v, single.grad))
    expected = double.of_one_rank()()
    work, positions = single.over_ranks(group)
    stock = tuple(x[:, :, positions] for x in single.of_one_rank()())
    return {"ring": error(work(), expected, positions), "one rank": error(stock, expected, positions)}


def measure(args: argparse.Namespace, dtype: torch.dtype, mask: str, group: Group) -> dict[str, Any]:
    case = Case(args, dtype, mask, args.length)
    times = interleaved(
        {"one rank": case.of_one_rank(), "ring": case.over_ranks(group)[0]}, args.rounds, before=dist.barrier
    )
    row = {
        "dtype": str(dtype).removeprefix("torch."),
        "mask": mask,
        "ring over one rank": ratio(times, "ring", "one rank"),
    }
    return row | {"median_ms": medians_ms(times), "errors": accuracy(args, mask, group)}


def tell(row: dict[str, Any]) -> None:
    spread, ms, errors = row["ring over one rank"], row["median_ms"], row["errors"]
    print(
        f"{row['dtype']:9} {row['mask']:7} one rank {ms['one rank']:6.0f} ms  ring {ms['ring']:6.0f} ms  "
        f"{spread['median']:.2f} ({spread['low']:.2f} to {spread['high']:.2f}) times; "
        f"float32 error {errors['ring']:.1e}, of one rank {errors['one rank']:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=32, help="of a head")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--masks", nargs="+", default=MASKS, choices=MASKS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    join(300.0)
    group, rows = Group(build_mesh("cpu", cp=dist.get_world_size()).get_group("cp")), []
    for dtype in args.dtypes:
        for mask in args.masks:
            rows.append(measure(args, getattr(torch, dtype), mask, group))
            if dist.get_rank() == 0:
                tell(rows[-1])
    if dist.get_rank() == 0:
        config = {name: getattr(args, name) for name in ("length", "heads", "kv_heads", "width", "rounds")}
        write_record(args.json, {"attention": config, "ranks": dist.get_world_size(), "rows": rows})
    dist.barrier()
    destroy_groups()


if __name__ == "__main__":
    main()
