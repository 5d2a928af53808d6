"""Train any shipped plan's model on text, on any mesh of pipeline, data and tensor parallelism.

    torchrun --standalone --nproc-per-node 8 benchmarks/train.py --pp 2 --dp 2 --tp 2 --zero 2 --sequence-parallel
    torchrun --nproc-per-node 8 benchmarks/train.py --plan gpt2 --tp 8 --device cuda --dtype bfloat16

Weights, batches and dropout do not depend on the mesh, so that every mesh of the same global batch prints the same losses.
With --save a run that was stopped goes on where it was, on the same mesh or on another.
Copy this file to start your own: all that makes it parallel is `build_mesh` and `parallelize_model`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from parallelize import (
    Checkpointer,
    ConsoleLogger,
    HubLogger,
    JSONLinesLogger,
    Loggers,
    ParallelizeError,
    ParallelModel,
    TensorBoardLogger,
    build_mesh,
    build_on_meta,
    destroy_groups,
    load_plan,
    parallelize_model,
)
from parallelize.ops.calibrate import peak_flops
from parallelize.pieces import data_rank
from parallelize.pipeline.gantt import draw

DATA = ("dp_replicate", "dp")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--plan", default="llama", help="a shipped plan: its first model type is built, in small")
    for axis in ("pp", "dp-replicate", "dp", "tp"):
        add(f"--{axis}", type=int, default=1)
    add("--zero", type=int, default=0, choices=[0, 1, 2, 3])
    add("--schedule", default="1f1b")
    add("--stages-per-rank", type=int)
    add("--microbatches", type=int, help="of each data rank's batch (default: twice pp)")
    add("--sequence-parallel", action="store_true")
    add("--no-loss-parallel", action="store_true")
    add("--overlap", default="off", choices=["off", "auto", "chunked", "symm_mem"])
    add("--recompute", default="off", choices=["off", "full", "selective"])
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--steps", type=int, default=20)
    add("--batch", type=int, default=16, help="sequences a step, over all data ranks")
    add("--context", type=int, default=128)
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--dropout", type=float, default=0.0)
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--text", type=Path, help="a file to read instead of Python's documentation")
    add("--log", type=Path, help="a folder for metrics as JSON lines, and for TensorBoard where it is installed")
    add("--hub", help="a repository of the Hugging Face Hub to which the folder of --log is uploaded")
    add("--save", type=Path, help="a folder for checkpoints; a run that finds some there goes on from the newest")
    add("--save-every", type=int, default=10, help="steps")
    add("--gantt", type=Path, help="write the last step's timeline to this .svg")
    return parser.parse_args()


def text_of(path: Path | None) -> torch.Tensor:
    """Bytes of a file, or of Python's own documentation topics: real text that is on every machine."""
    if path is not None:
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics[key] for key in sorted(topics)).encode()), dtype=torch.uint8)


def batch_of(
    text: torch.Tensor, step: int, given: argparse.Namespace, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, next ids) [rows, context] of this data rank: its rows of the step's one global batch."""
    generator = torch.Generator().manual_seed(given.seed * 1_000_003 + step)
    starts = torch.randint(0, len(text) - given.context - 1, (given.batch,), generator=generator)
    place, ranks = data_rank(mesh, DATA)
    rows = given.batch // ranks
    mine = starts[place * rows : (place + 1) * rows].tolist()
    block = torch.stack([text[start : start + given.context + 1] for start in mine]).long().to(given.device)
    return block[:, :-1], block[:, 1:]


def check_batches(ids: torch.Tensor, mesh: DeviceMesh) -> None:
    """Ranks of one place along the data axes hold the same batch, others different ones; ends the run otherwise."""
    place, _ = data_rank(mesh, DATA)
    weights = torch.arange(1, ids.numel() + 1, device=ids.device) * 2654435761 % 1_000_003
    mine = torch.tensor([place, int((ids.flatten() * weights).sum())], device=ids.device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    by_place: dict[int, set[int]] = {}
    for one in everyone:
        by_place.setdefault(int(one[0]), set()).add(int(one[1]))
    together = [digest for digests in by_place.values() for digest in digests]
    if any(len(digests) > 1 for digests in by_place.values()) or len(set(together)) < len(by_place):
        raise SystemExit("batches: ranks of one data rank must hold the same rows, other data ranks other rows")


def build(given: argparse.Namespace):
    """The plan's model, small, on meta."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    kind = load_plan(given.plan).model_types[0]
    heads = max(2, given.hidden // 32)
    sizes = {
        "vocab_size": 256,
        "hidden_size": given.hidden,
        "num_hidden_layers": given.layers,
        "num_attention_heads": heads,
        "max_position_embeddings": given.context,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    sizes |= {"n_inner": 3 * given.hidden} if kind == "gpt2" else {}
    sizes |= {"ffn_dim": 3 * given.hidden, "word_embed_proj_dim": given.hidden} if kind == "opt" else {}
    known = AutoConfig.for_model(kind)
    if hasattr(known, "intermediate_size"):
        sizes["intermediate_size"] = 3 * given.hidden
    if getattr(known, "num_key_value_heads", None) is not None:
        sizes["num_key_value_heads"] = max(2, heads // 2)
    if getattr(known, "head_dim", None) is not None:
        sizes["head_dim"] = given.hidden // heads
    rates = [
        name for name in vars(known) if name.endswith(("dropout", "_pdrop", "dropout_prob")) and "layer" not in name
    ]
    sizes |= {name: given.dropout for name in rates if isinstance(getattr(known, name), float)}
    config = AutoConfig.for_model(kind, **sizes)
    config.use_cache = False
    made = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    return build_on_meta(made.from_config, config).train()


def flops_per_token(parameters: int, given: argparse.Namespace) -> float:
    """Of forward and backward: 6 a parameter, and attention's products (arXiv:2204.02311, appendix B)."""
    return 6.0 * parameters + 12.0 * given.layers * given.hidden * given.context


def memory_gib(device: str) -> float:
    """Peak so far, of the rank that has most."""
    if device == "cuda":
        used = torch.tensor(float(torch.cuda.max_memory_allocated()), device=device)
    else:
        import resource

        used = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    return float(used) / 2**30


def train(parallel: ParallelModel, mesh: DeviceMesh, given: argparse.Namespace, parameters: int) -> None:
    rank = dist.get_rank()
    text, tokens = text_of(given.text), given.batch * given.context
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=given.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5) * (0.1 + 0.9 * math.cos(step / given.steps * math.pi / 2))
    )
    peak = peak_flops(given.device, getattr(torch, given.dtype)) * dist.get_world_size()
    writers: list = [ConsoleLogger(every=max(1, given.steps // 10))]
    if given.log is not None:
        writers.append(JSONLinesLogger(given.log / "metrics.jsonl", enabled=rank == 0))
        with contextlib.suppress(ParallelizeError):  # TensorBoard is an extra
            writers.append(TensorBoardLogger(given.log, enabled=rank == 0))
        if given.hub is not None:
            writers.append(HubLogger(given.hub, given.log, enabled=rank == 0))
    with contextlib.ExitStack() as stack:
        logger = stack.enter_context(Loggers(writers, enabled=rank == 0))
        first, save = 0, None
        if given.save is not None:
            options = {"optimizer": optimizer, "scheduler": schedule, "asynchronous": True, "keep_last": 2}
            save = stack.enter_context(Checkpointer(given.save, parallel, **options))
            first = save.resume()
        for step in range(first, given.steps):
            ids, labels = batch_of(text, step, given, mesh)
            if step == first:
                check_batches(ids, mesh)
            parallel.pipeline.record = step == given.steps - 1 and given.gantt is not None
            began = time.perf_counter()
            loss = parallel.step(input_ids=ids, targets=labels)
            norm = parallel.clip_grad_norm_(1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            loss = float(loss)  # waits for the step
            rate = tokens / (time.perf_counter() - began)
            scalars = {"loss": loss, "grad_norm": float(norm), "tokens_per_s": rate}
            scalars |= {"mfu": rate * flops_per_token(parameters, given) / peak, "memory_gib": memory_gib(given.device)}
            logger.log(scalars, step)
            if save is not None and (step + 1) % given.save_every == 0:
                save.save(step + 1)
    parallel.check_ties()
    if given.gantt is not None:
        timeline = parallel.pipeline.timeline()
        if rank == 0:
            draw(timeline, given.gantt, f"{given.schedule}: one step, measured", unit="ms")


def main() -> None:
    given = options()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if given.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    sizes = {"pp": given.pp, "dp_replicate": given.dp_replicate, "dp": given.dp, "tp": given.tp}
    mesh = build_mesh(given.device, **({axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}))
    model = build(given)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    parallel = parallelize_model(
        model,
        mesh,
        given.plan,
        zero=given.zero,
        schedule=given.schedule,
        stages_per_rank=given.stages_per_rank,
        num_microbatches=given.microbatches,
        sequence_parallel=given.sequence_parallel and given.tp > 1,
        loss_parallel=given.tp > 1 and not given.no_loss_parallel,
        overlap=given.overlap,
        recompute=given.recompute,
        dtype=torch.bfloat16 if given.dtype == "bfloat16" else None,
        initialize=given.seed,
        dropout_seed=given.seed,
    )
    if dist.get_rank() == 0:
        axes = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one process"
        print(f"{given.plan}, {parameters:,} parameters, {axes}, zero={given.zero}", flush=True)
    train(parallel, mesh, given, parameters)
    destroy_groups()


if __name__ == "__main__":
    main()
