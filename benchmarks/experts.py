"""A training step of a small Qwen3-MoE whose experts are divided over the data ranks, against `transformers`' expert
parallelism.

    torchrun --nproc-per-node 2 -m benchmarks.experts
    sudo python -m benchmarks.slow_link --rate 1gbit -- -m benchmarks.experts

| contender | what runs |
| --- | --- |
| transformers | its `DistributedConfig(fsdp_size=N, ep_size=N)`: a row for each choice of a token, and `fully_shard` |
| ours | `parallelize_module(ep=N)` and `shard_data(zero=3)`: a row for each rank of a token's choices, reduced before it returns |
| overlapped | the same with `overlap="chunked"`: one half of the tokens travels while the other half is computed |

Every rank has other tokens. All contenders are checked to give the same loss and gradients before they are timed. Bytes
are those that leave a rank in all-to-alls, counted in the dispatcher. With `--balanced`, routers of full steps choose
evenly (`balanced_routing`).

Then one block alone, forward and backward, interleaved: by hand in plain functions (a row for each choice, see
`benchmarks.expert_block`) and by us; and the stock block beside ours at ep 1, with few tokens, which is the cost of the
host.
"""  # noqa: E501

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.expert_block import measure_blocks
from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import balanced_routing, build_mesh, destroy_groups, parallelize_module, shard_data

VOCABULARY = 512
OURS = {"ours": "off", "overlapped": "chunked"}


def stock(options: argparse.Namespace) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=options.hidden,
        moe_intermediate_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=options.hidden // 8,
        num_experts=options.experts,
        num_experts_per_tok=options.choices,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config)


def contenders(options: argparse.Namespace) -> dict[str, torch.nn.Module]:
    ranks = dist.get_world_size()
    models = {"transformers": distributed_by_transformers(stock(options), ranks)}
    mesh = build_mesh("cpu", dp=ranks, tp=1)
    for name, overlap in OURS.items():
        model = parallelize_module(stock(options), mesh, ep=ranks, overlap=overlap)
        models[name] = shard_data(model, mesh, zero=3)
    return models


def distributed_by_transformers(model: Any, ranks: int) -> torch.nn.Module:
    """The model that exists, as `from_pretrained(distributed_config=...)` distributes one before it loads weights."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=ranks, ep_size=ranks)
    _, _, meshes = type(model).prepare_distribute_model(config, None)
    return type(model).maybe_distribute_model(model, config, meshes)


def step_of(model: torch.nn.Module, ids: torch.Tensor, scale: float) -> Callable[[], float]:
    """scale: of the loss. Ours are sums over ranks, those of `transformers` means."""

    def run() -> float:
        for parameter in model.parameters():
            parameter.grad = None
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), ids.view(-1))
        (loss * scale).backward()
        return float(loss.detach())

    return run


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    full = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        full[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return full


class AllToAllBytes(TorchDispatchMode):
    """Counts the bytes that leave this rank in all-to-alls."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name == "all_to_all_single":
            self._count(args[0], args[2])
        elif func.namespace == "c10d" and name == "alltoall_base_":
            self._count(args[1], args[4])
        return func(*args, **(kwargs or {}))

    def _count(self, x: torch.Tensor, splits: Any) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        rows = list(splits) or [len(x) // ranks] * ranks
        if sum(rows):
            self.sent += x.numel() * x.element_size() * (sum(rows) - rows[rank]) // sum(rows)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    models, ranks = contenders(options), dist.get_world_size()
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    ids = torch.randint(0, VOCABULARY, (options.batch, options.length), generator=generator)
    steps = {name: step_of(model, ids, 1 / ranks if name in OURS else 1.0) for name, model in models.items()}
    compare(models, {name: step() for name, step in steps.items()})
    balanced = [balanced_routing(model) if options.balanced else nullcontext() for model in models.values()]
    for context in balanced:
        context.__enter__()
    sent = {}
    for name, step in steps.items():
        with AllToAllBytes() as counting:
            step()
        sent[name] = counting.sent
    times = interleaved(steps, options.rounds, before=dist.barrier)
    result: dict[str, Any] = {"ranks": ranks, **vars(options), "ms": medians_ms(times), "all_to_all_bytes": sent}
    result["bytes ours/transformers"] = sent["ours"] / sent["transformers"]
    for name in OURS:
        result[f"transformers/{name}"] = ratio(times, "transformers", name)
    result["ours/overlapped"] = ratio(times, "ours", "overlapped")
    return {**result, **measure_blocks(lambda: stock(options), options)}


def compare(models: dict[str, torch.nn.Module], losses: dict[str, float]) -> None:
    """Raises: AssertionError where losses or gradients differ."""
    expected = gradients(models["transformers"])
    for name in OURS:
        assert abs(losses[name] - losses["transformers"]) < 1e-5 * losses["transformers"], losses
        for key, grad in gradients(models[name]).items():
            error = float((grad - expected[key]).abs().max() / expected[key].abs().max())
            assert error < 1e-3, (name, key, error)


def show(result: dict[str, Any]) -> None:
    ms = ", ".join(f"{name} {value:.0f} ms" for name, value in result["ms"].items())
    print(f"{result['ranks']} ranks, {result['batch'] * result['length']} tokens on each: {ms}", flush=True)
    sent = ", ".join(f"{name} {value / 1e6:.2f} MB" for name, value in result["all_to_all_bytes"].items())
    print(
        f"  sent in all-to-alls by rank 0: {sent}; ours/transformers {result['bytes ours/transformers']:.3f}",
        flush=True,
    )
    print("  " + ", ".join(f"{name} {value:.2f} ms" for name, value in result["block ms"].items()), flush=True)
    for name, value in result.items():
        if isinstance(value, dict) and "median" in value:
            print(f"  {name:<24} {value['median']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=64, help="of one expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--choices", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--balanced", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    join()
    path = options.__dict__.pop("json")
    result = measure(options)
    if dist.get_rank() == 0:
        show(result)
        write_record(path, result)
    destroy_groups()


if __name__ == "__main__":
    main()
