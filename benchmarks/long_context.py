"""Time and peak activation memory over sequence length: no context parallelism, Ulysses, a ring, both.

    torchrun --nproc-per-node 2 -m benchmarks.long_context
    torchrun --nproc-per-node 4 -m benchmarks.long_context
    sudo python -m benchmarks.slow_link --rate 1gbit -- -m benchmarks.long_context --link 1gbit
    sudo python -m benchmarks.slow_link --ranks 4 --rate 1gbit -- -m benchmarks.long_context --link 1gbit

A stock Llama trains one step: forward, loss, backward, reduction of gradients over `cp`. "none" is the same with the
full sequence on each rank. Memory is the peak of the storages that a step allocates, without gradients; ideally it is
1/cp of "none". The results say whether PyTorch's own `context_parallel` runs here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.memory import peak_bytes
from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import build_mesh, destroy_groups, parallelize_model

VOCABULARY = 512
Step = Callable[[], object]


def llama(args: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden, "intermediate_size": 2 * args.hidden, "num_hidden_layers": args.layers}
    heads = {"num_attention_heads": args.heads, "num_key_value_heads": args.kv_heads}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=2**17, **sizes, **heads))


def batch(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def alone(args: argparse.Namespace) -> Callable[[int], Step]:
    model = llama(args)

    def of(length: int) -> Step:
        ids, targets = batch(length)

        def step() -> torch.Tensor:
            model.zero_grad(set_to_none=False)
            loss = F.cross_entropy(model(input_ids=ids, use_cache=False).logits.flatten(0, 1), targets.flatten())
            loss.backward()
            return loss.detach()

        return step

    return of


def over_cp(args: argparse.Namespace, ulysses: int) -> Callable[[int], Step]:
    parallel = parallelize_model(llama(args), build_mesh("cpu", cp=dist.get_world_size()), ulysses=ulysses)

    def of(length: int) -> Step:
        ids, targets = batch(length)

        def step() -> torch.Tensor:
            parallel.module.zero_grad(set_to_none=False)
            return parallel.step(input_ids=ids, targets=targets)

        return step

    return of


def pytorch_failure(args: argparse.Namespace) -> str:
    """Why PyTorch's own `context_parallel` does not run here; empty if it does."""
    try:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method("allgather")
        mesh = build_mesh("cpu", cp=dist.get_world_size())
        x = torch.randn(1, 2, 8 * dist.get_world_size(), 8, requires_grad=True)
        with context_parallel(mesh, buffers=[x.detach()], buffer_seq_dims=[2]):
            F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    except Exception as error:  # of any type: the text is the result
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return ""


def contenders(args: argparse.Namespace) -> dict[str, Callable[[int], Step]]:
    size = dist.get_world_size()
    variants = {"none": alone(args), "ulysses": over_cp(args, size), "ring": over_cp(args, 1)}
    return variants | ({"both": over_cp(args, 2)} if size > 2 else {})


def check(steps: dict[str, Step]) -> None:
    """Check that all variants compute the same loss."""
    losses = {name: float(step()) for name, step in steps.items()}  # type: ignore[arg-type]
    worst = max(abs(loss - losses["none"]) / losses["none"] for loss in losses.values())
    if worst > 1e-5:
        raise SystemExit(f"losses differ by {worst:.1e}: {losses}")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, variants = [], contenders(args)
    for length in args.lengths:
        steps = {name: of(length) for name, of in variants.items()}
        check(steps)
        times = interleaved(steps, args.rounds, before=dist.barrier)
        peaks = {name: peak_bytes(step, 3) for name, step in steps.items()}
        for name in steps:
            rows.append(
                {
                    "length": length,
                    "kind": name,
                    "median_ms": medians_ms(times)[name],
                    "times_of_none": ratio(times, name, "none"),
                    "peak_bytes": peaks[name],
                    "share_of_none": peaks[name] / peaks["none"],
                    "against_1_over_cp": 1.0 if name == "none" else peaks[name] / peaks["none"] * dist.get_world_size(),
                }
            )
            tell(rows[-1])
    return rows


def tell(row: dict[str, Any]) -> None:
    if dist.get_rank():
        return
    spread = row["times_of_none"]
    print(
        f"{row['length']:7} {row['kind']:8} {row['median_ms']:9.0f} ms  {spread['median']:5.2f} x none "
        f"({spread['low']:.2f} to {spread['high']:.2f})  {row['peak_bytes'] / 2**20:8.1f} MiB  "
        f"{row['against_1_over_cp']:5.2f} x none/cp",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", default="loopback", help="how the link is called in the results")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    join(600.0)
    reason = pytorch_failure(args)
    rows = measure(args)
    if dist.get_rank() == 0:
        print("PyTorch's context_parallel: " + (reason or "runs here, but not for a stock model's forward"))
        results = {"ranks": dist.get_world_size(), "link": args.link, "pytorch": reason, "rows": rows}
        config = {name: getattr(args, name) for name in ("hidden", "layers", "heads", "kv_heads", "rounds")}
        write_record(args.json, {"model": config, **results})
    dist.barrier()
    destroy_groups()


if __name__ == "__main__":
    main()
