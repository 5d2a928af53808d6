"""Single ops of a GPU against PyTorch's own: head and loss in one, a loss of logits, and the attention kernels of a
ring.

    python -m benchmarks.one_gpu_ops                     # bfloat16, sizes of Llama 3 8B
    python -m benchmarks.one_gpu_ops --device cpu        # small ones, to try the script

| figure | |
|---|---|
| head and loss | `linear_cross_entropy` against `F.cross_entropy(F.linear(...).float())`: time and peak memory, forward and backward |
| loss | `cross_entropy` of half-precision logits against `F.cross_entropy` of them in float32, forward and backward |
| attention | what a ring of one rank runs against `scaled_dot_product_attention`, causal, forward and backward |
"""  # noqa: E501

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.one_device import peak_of, until_done, wait
from benchmarks.record import write_record
from benchmarks.timing import interleaved, medians_ms, ratio
from parallelize import cross_entropy, linear_cross_entropy
from parallelize.axes.context.sequence_shards import SequenceLayout
from parallelize.comm.groups import Group
from parallelize.ops.attention.ring_attention import Masking, ring_attention

SMALL = dict(tokens=256, hidden=64, vocab=512, heads=4, width=16, rounds=3)
LARGE = dict(tokens=8192, hidden=4096, vocab=128256, heads=32, width=128, rounds=20)
Work = dict[str, Callable[[], list[torch.Tensor]]]


def head_and_loss(args: argparse.Namespace, dtype: torch.dtype) -> Work:
    """One forward and backward of each, from the same tensors."""
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, dtype=dtype, device=args.device).requires_grad_()
    weight = (torch.randn(args.vocab, args.hidden, device=args.device) * args.hidden**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(args.vocab, (args.tokens,), device=args.device)

    def stock() -> list[torch.Tensor]:
        loss = F.cross_entropy(F.linear(hidden, weight).float(), targets)
        return [loss, *torch.autograd.grad(loss, (hidden, weight))]

    def fused() -> list[torch.Tensor]:
        loss = linear_cross_entropy(hidden, weight, targets)
        return [loss, *torch.autograd.grad(loss, (hidden, weight))]

    return {"stock": stock, "fused": fused}


def loss_of_logits(args: argparse.Namespace, dtype: torch.dtype) -> Work:
    torch.manual_seed(0)
    logits = torch.randn(args.tokens // 2, args.vocab, dtype=dtype, device=args.device).requires_grad_()
    targets = torch.randint(args.vocab, (args.tokens // 2,), device=args.device)

    def stock() -> list[torch.Tensor]:
        loss = F.cross_entropy(logits.float(), targets)
        return [loss, *torch.autograd.grad(loss, logits)]

    def ours() -> list[torch.Tensor]:
        loss = cross_entropy(logits, targets)
        return [loss, *torch.autograd.grad(loss, logits)]

    return {"stock": stock, "ours": ours}


def attention(args: argparse.Namespace, dtype: torch.dtype) -> Work:
    torch.manual_seed(0)
    shapes = [(1, heads, args.tokens, args.width) for heads in (args.heads, args.heads // 4, args.heads // 4)]
    q, k, v = (torch.randn(shape, dtype=dtype, device=args.device).requires_grad_() for shape in shapes)
    upstream = torch.randn_like(q)
    layout, masking = (SequenceLayout(args.tokens).of_ring_rank(0),), Masking(True, 0, args.width**-0.5)

    def stock() -> list[torch.Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return [out, *torch.autograd.grad(out, (q, k, v), upstream)]

    def ring() -> list[torch.Tensor]:
        out = ring_attention(q, k, v, Group.alone(), layout, masking)
        return [out, *torch.autograd.grad(out, (q, k, v), upstream)]

    return {"stock": stock, "ring": ring}


def measure(work: Work, ours: str, args: argparse.Namespace) -> dict[str, Any]:
    results = {name: run() for name, run in work.items()}
    pairs = zip(*([tensor.detach() for tensor in result] for result in results.values()), strict=True)
    differences = [float((actual - stock).abs().max() / stock.abs().max()) for stock, actual in pairs]
    del results, pairs
    times = interleaved(work, args.rounds, before=wait)
    peaks = {name: peak_of(run) for name, run in work.items()}
    return {
        "ms": medians_ms(times),
        f"{ours}/stock": ratio(times, ours, "stock"),
        "peak_mib": {name: peak / 2**20 for name, peak in peaks.items()},
        "largest difference": max(differences),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    for name in SMALL:
        parser.add_argument(f"--{name}", type=int, help=f"default: {LARGE[name]} on a GPU, {SMALL[name]} on the CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name, value in (LARGE if args.device == "cuda" else SMALL).items():
        setattr(args, name, getattr(args, name) or value)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    result = {"setting": {name: getattr(args, name) for name in SMALL} | {"device": args.device, "dtype": str(dtype)}}
    contenders = (
        ("head and loss", head_and_loss, "fused"),
        ("loss", loss_of_logits, "ours"),
        ("attention", attention, "ring"),
    )
    for name, work, ours in contenders:
        result[name] = measure(until_done(work(args, dtype)), ours, args)
        print(f"{name}: {result[name]}", flush=True)
    write_record(args.json, result)


if __name__ == "__main__":
    main()
