"""Heads of a student and a teacher and their divergence in one, against separate heads and `F.kl_div`: time, memory.

    python -m benchmarks.distillation                               # one rank
    torchrun --nproc-per-node 2 -m benchmarks.distillation          # vocabulary over two ranks (gloo)

Forward and backward of KL(teacher || student), gradients of the student's hidden states and head. Time and memory are
measured as in `benchmarks.fused_loss`. Separate and sharded is the same two matmuls with `distillation_loss` of the
sharded logits.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from benchmarks.fused_loss import VOCABULARY, show
from benchmarks.memory import peak_bytes
from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import (
    build_mesh,
    destroy_groups,
    distillation_loss,
    linear_distillation_loss,
    top_k_distillation_loss,
    top_k_log_probs,
)
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.comm.groups import Group
from parallelize.ops import collectives as ops
from parallelize.ops.vocabulary.class_targets import Vocabulary

K = 64


def variants(tokens: int, width: int, teacher_width: int, tp: int) -> dict[str, Callable[[], object]]:
    """name -> one forward and backward, from the same tensors."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).requires_grad_()
    theirs = torch.randn(tokens, teacher_width)
    weights = [torch.randn(VOCABULARY, size) * size**-0.5 for size in (width, teacher_width)]
    mesh = build_mesh("cpu", tp=tp) if tp > 1 else None
    group = Group(mesh.get_group()) if mesh is not None else Group.alone()
    vocabulary = Vocabulary(VOCABULARY, group)
    local, other = (weight[vocabulary.start : vocabulary.stop].clone() for weight in weights)
    local.requires_grad_()
    heads = [local, other]
    if mesh is not None:
        heads = [DTensor.from_local(x.detach(), mesh, [Shard(0)], run_check=False) for x in heads]
        heads[0].requires_grad_()

    def forget() -> None:
        hidden.grad = local.grad = heads[0].grad = None

    def separate() -> None:
        forget()
        student, teacher = F.linear(ops.copy(hidden, group), local), F.linear(theirs, other)
        if tp == 1:
            F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean").backward()
        else:
            distillation_loss(mark(student, vocabulary), mark(teacher, vocabulary)).backward()

    def in_chunks() -> None:
        forget()
        linear_distillation_loss(hidden, heads[0], theirs, heads[1]).backward()

    with torch.no_grad():
        entries = top_k_log_probs(mark(F.linear(theirs, other), vocabulary), K)

    def of_entries() -> None:
        forget()
        logits = mark(F.linear(ops.copy(hidden, group), local), vocabulary)
        top_k_distillation_loss(logits, *entries).backward()

    return {"unfused": separate, "fused": in_chunks, f"{K} entries": of_entries}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--teacher", type=int, default=1024, help="the width of the teacher (1024)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tp = 1
    if "WORLD_SIZE" in os.environ:
        join()
        tp = dist.get_world_size()
    work = variants(args.tokens, args.hidden, args.teacher, tp)
    times = interleaved(work, args.rounds, before=dist.barrier if tp > 1 else None)
    peaks = {name: peak_bytes(run) for name, run in work.items()}
    result = {
        "tokens": args.tokens,
        "hidden": args.hidden,
        "teacher": args.teacher,
        "vocabulary": VOCABULARY,
        "dtype": "float32",
        "tp": tp,
        "ms": medians_ms(times),
        "time_ratio": {name: ratio(times, name, "unfused") for name in work if name != "unfused"},
        "peak_mib": {name: peak / 2**20 for name, peak in peaks.items()},
        "memory_ratio": {name: peak / peaks["unfused"] for name, peak in peaks.items() if name != "unfused"},
    }
    if tp == 1 or dist.get_rank() == 0:
        show(result)
        write_record(args.json, result)
    if tp > 1:
        destroy_groups()


if __name__ == "__main__":
    main()
