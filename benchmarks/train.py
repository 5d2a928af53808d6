"""Train any shipped plan's model on text, on any mesh of pipeline, data and tensor parallelism.

    torchrun --standalone --nproc-per-node 8 benchmarks/train.py --pp 2 --dp 2 --tp 2 --zero 2 --sequence-parallel
    torchrun --nproc-per-node 8 benchmarks/train.py --plan gpt2 --tp 8 --device cuda --dtype bfloat16
    torchrun --nproc-per-node 2 benchmarks/train.py --model qwen3_moe --ep 2

Weights, batches and dropout do not depend on the mesh, so that every mesh of the same global batch prints the same
losses. With --save, a run that was stopped resumes, on the same mesh or on another. Copy this file to start your own:
only `build_mesh` and `parallelize_model` make it parallel.
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
from parallelize.axes.pipeline.schedule_chart import draw
from parallelize.axes.tensor.experts.routing_load import EXPERT, RANK, ExpertLoad
from parallelize.comm.mesh_view import MeshView
from parallelize.ops.matmul.calibrate import peak_flops

DATA = ("dp_replicate", "dp")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        *("--plan", "--model"),
        default="llama",
        help="a shipped plan, whose first model type is built in small, or one of the model types that plans serve",
    )
    for axis in ("pp", "dp-replicate", "tp"):
        add(f"--{axis}", type=int, default=1)
    add("--dp", type=int, help="(default: 1, or as many as --ep needs beside the other axes)")
    add("--ep", type=int, default=1, help="ranks of dp x tp over which the experts of a mixture are divided")
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
    add(
        "--compare-every", type=int, help="steps between comparisons of what ranks store alike (0: never; default: 100)"
    )
    add("--gantt", type=Path, help="write the last step's timeline to this .svg")
    args = parser.parse_args()
    args.dp = args.dp or max(1, args.ep // (args.dp_replicate * args.tp))
    return args


def text_of(path: Path | None) -> torch.Tensor:
    """The bytes of a file, or of Python's documentation topics, which exist on every machine."""
    if path is not None:
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics[key] for key in sorted(topics)).encode()), dtype=torch.uint8)


def batch_of(
    text: torch.Tensor, step: int, args: argparse.Namespace, mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, next ids) [local batch, context] of this data rank: its sequences of the step's global batch."""
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(0, len(text) - args.context - 1, (args.batch,), generator=generator)
    rank, ranks = MeshView(mesh).place(*DATA)
    local_batch = args.batch // ranks
    local_starts = starts[rank * local_batch : (rank + 1) * local_batch].tolist()
    block = torch.stack([text[start : start + args.context + 1] for start in local_starts]).long().to(args.device)
    return block[:, :-1], block[:, 1:]


def check_batches(ids: torch.Tensor, mesh: DeviceMesh) -> None:
    """Check that ranks have the same batch exactly if they have the same data rank; exit otherwise."""
    rank, _ = MeshView(mesh).place(*DATA)
    weights = torch.arange(1, ids.numel() + 1, device=ids.device) * 2654435761 % 1_000_003
    local_digest = torch.tensor([rank, int((ids.flatten() * weights).sum())], device=ids.device)
    digests_of_all = [torch.empty_like(local_digest) for _ in range(dist.get_world_size())]
    dist.all_gather(digests_of_all, local_digest)
    by_rank: dict[int, set[int]] = {}
    for gathered_digest in digests_of_all:
        by_rank.setdefault(int(gathered_digest[0]), set()).add(int(gathered_digest[1]))
    together = [digest for digests in by_rank.values() for digest in digests]
    if any(len(digests) > 1 for digests in by_rank.values()) or len(set(together)) < len(by_rank):
        raise SystemExit("batches: ranks of one data rank must hold the same rows, other data ranks other rows")


def build(args: argparse.Namespace):
    """A small model of the plan's family, on meta."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    served = load_plan(args.plan).model_types
    kind = args.plan if args.plan in served else served[0]
    heads = max(2, args.hidden // 32)
    sizes = {
        "vocab_size": 256,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "max_position_embeddings": args.context,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    sizes |= {"n_inner": 3 * args.hidden} if kind == "gpt2" else {}
    sizes |= {"ffn_dim": 3 * args.hidden, "word_embed_proj_dim": args.hidden} if kind == "opt" else {}
    defaults = AutoConfig.for_model(kind)
    if hasattr(defaults, "intermediate_size"):
        sizes["intermediate_size"] = 3 * args.hidden
    if getattr(defaults, "num_key_value_heads", None) is not None:
        sizes["num_key_value_heads"] = max(2, heads // 2)
    if getattr(defaults, "head_dim", None) is not None:
        sizes["head_dim"] = args.hidden // heads
    sizes |= {key: value for key, value in expert_sizes(args).items() if hasattr(defaults, key)}
    rates = [
        name for name in vars(defaults) if name.endswith(("dropout", "_pdrop", "dropout_prob")) and "layer" not in name
    ]
    sizes |= {name: args.dropout for name in rates if isinstance(getattr(defaults, name), float)}
    config = AutoConfig.for_model(kind, **sizes)
    config.use_cache = False
    auto_class = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    return build_on_meta(auto_class.from_config, config).train()


EXPERTS, CHOICES = 8, 2


def expert_sizes(args: argparse.Namespace) -> dict[str, int]:
    """Of a mixture, by the names that configs have for them."""
    counts = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS)
    widths = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), args.hidden)
    return counts | widths | {"num_experts_per_tok": CHOICES, "moe_k": CHOICES, "n_group": 1, "topk_group": 1}


def active_parameters(model: torch.nn.Module) -> int:
    """Those that a token meets: of the experts, the chosen ones."""
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return sum(p.numel() for p in model.parameters()) - experts + experts * CHOICES // EXPERTS


def flops_per_token(parameters: int, args: argparse.Namespace) -> float:
    """Of forward and backward: 6 for each parameter, and those of attention (arXiv:2204.02311, appendix B)."""
    return 6.0 * parameters + 12.0 * args.layers * args.hidden * args.context


def memory_gib(device: str) -> float:
    """The peak so far, on the rank where it is largest."""
    if device == "cuda":
        used = torch.tensor(float(torch.cuda.max_memory_allocated()), device=device)
    else:
        import resource

        used = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    return float(used) / 2**30


def train(parallel: ParallelModel, mesh: DeviceMesh, args: argparse.Namespace, parameters: int) -> None:
    rank = dist.get_rank()
    text, tokens = text_of(args.text), args.batch * args.context
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5) * (0.1 + 0.9 * math.cos(step / args.steps * math.pi / 2))
    )
    peak = peak_flops(args.device, getattr(torch, args.dtype)) * dist.get_world_size()
    load = ExpertLoad(parallel.module)
    writers: list = [ConsoleLogger(every=max(1, args.steps // 10), formats={EXPERT: ".2f", RANK: ".2f"})]
    if args.log is not None:
        writers.append(JSONLinesLogger(args.log / "metrics.jsonl", enabled=rank == 0))
        with contextlib.suppress(ParallelizeError):  # TensorBoard is an extra
            writers.append(TensorBoardLogger(args.log, enabled=rank == 0))
        if args.hub is not None:
            writers.append(HubLogger(args.hub, args.log, enabled=rank == 0))
    with contextlib.ExitStack() as stack:
        logger = stack.enter_context(Loggers(writers, enabled=rank == 0))
        first, save = 0, None
        if args.save is not None:
            options = {"optimizer": optimizer, "scheduler": schedule, "asynchronous": True, "keep_last": 2}
            save = stack.enter_context(Checkpointer(args.save, parallel, **options))
            first = save.resume()
        for step in range(first, args.steps):
            ids, labels = batch_of(text, step, args, mesh)
            if step == first:
                check_batches(ids, mesh)
            parallel.pipeline.record = step == args.steps - 1 and args.gantt is not None
            began = time.perf_counter()
            with load.counting():
                loss = parallel.step(input_ids=ids, targets=labels)
            norm = parallel.clip_grad_norm_(1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            loss = float(loss)  # waits for the step
            rate = tokens / (time.perf_counter() - began)
            scalars = {"loss": loss, "grad_norm": float(norm), "tokens_per_s": rate}
            scalars |= {"mfu": rate * flops_per_token(parameters, args) / peak, "memory_gib": memory_gib(args.device)}
            logger.log(scalars | load.scalars(), step)
            if save is not None and (step + 1) % args.save_every == 0:
                save.save(step + 1)
    parallel.check_ties()
    if args.gantt is not None:
        timeline = parallel.pipeline.timeline()
        if rank == 0:
            draw(timeline, args.gantt, f"{args.schedule}: one step, measured", unit="ms")


def main() -> None:
    args = options()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    sizes = {"pp": args.pp, "dp_replicate": args.dp_replicate, "dp": args.dp, "tp": args.tp}
    mesh = build_mesh(args.device, **({axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}))
    model = build(args)
    parameters, active = sum(parameter.numel() for parameter in model.parameters()), active_parameters(model)
    parallel = parallelize_model(
        model,
        mesh,
        args.plan,
        zero=args.zero,
        schedule=args.schedule,
        stages_per_rank=args.stages_per_rank,
        num_microbatches=args.microbatches,
        sequence_parallel=args.sequence_parallel and args.tp > 1,
        loss_parallel=args.tp > 1 and not args.no_loss_parallel,
        overlap=args.overlap,
        ep=args.ep,
        recompute=args.recompute,
        dtype=torch.bfloat16 if args.dtype == "bfloat16" else None,
        initialize=args.seed,
        dropout_seed=args.seed,
        compare_every=args.compare_every,
    )
    if dist.get_rank() == 0:
        axes = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one process"
        folding = f", ep={args.ep}" if args.ep > 1 else ""
        print(f"{args.plan}, {parameters:,} parameters, {axes}{folding}, zero={args.zero}", flush=True)
    train(parallel, mesh, args, active)
    destroy_groups()


if __name__ == "__main__":
    main()
