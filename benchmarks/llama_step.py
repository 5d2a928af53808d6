"""A training step of one Llama-like model: PyTorch's tensor and sequence parallelism, this toolkit, this toolkit
overlapped.

    torchrun --nproc-per-node 2 -m benchmarks.llama_step
    sudo python -m benchmarks.slow_link --rate 1gbit -- -m benchmarks.llama_step --hidden 256 512

The plan and PyTorch's dict say the same; all variants are checked to give the same loss and gradients before they are
timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module as stock_parallelize

from benchmarks import llama
from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import destroy_groups, overlap_report, parallelize_module

VARIANTS = ("stock", "sync", "chunked", "auto")


def models(hidden: int, layers: int) -> dict[str, torch.nn.Module]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    variants: dict[str, torch.nn.Module] = {}
    for name in VARIANTS:
        torch.manual_seed(0)
        model = llama.Llama(hidden, layers)
        if name == "stock":
            stock_parallelize(model, mesh, llama.stock_styles(sequence_parallel=True))
        else:
            overlap = "off" if name == "sync" else name
            parallelize_module(model, mesh, llama.plan(), sequence_parallel=True, overlap=overlap)
        variants[name] = model
    return variants


def step_of(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], float]:
    def run() -> float:
        for parameter in model.parameters():
            parameter.grad = None
        logits = model(ids)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))
        loss.backward()
        return float(loss)

    return run


def gradient_norms(model: torch.nn.Module) -> list[float]:
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [float(grad.norm()) for grad in gradients]  # type: ignore[union-attr]


def measure(hidden: int, layers: int, length: int, rounds: int) -> dict:
    variants = models(hidden, layers)
    ids = torch.randint(0, 512, (1, length), generator=torch.Generator().manual_seed(1))
    steps = {name: step_of(model, ids) for name, model in variants.items()}
    losses = {name: step() for name, step in steps.items()}
    norms = {name: gradient_norms(model) for name, model in variants.items()}
    for name in VARIANTS[1:]:
        assert abs(losses[name] - losses["stock"]) < 1e-5 * losses["stock"], losses
        for ours, stock in zip(norms[name], norms["stock"], strict=True):
            assert abs(ours - stock) < 1e-4 * max(stock, 1e-3), name
    times = interleaved(steps, rounds, before=dist.barrier)
    result = {"hidden": hidden, "layers": layers, "length": length, "ms": medians_ms(times), "loss": losses["stock"]}
    for name in VARIANTS[1:]:
        result[f"stock/{name}"] = ratio(times, "stock", name)
    result["sync/chunked"] = ratio(times, "sync", "chunked")
    result["report"] = overlap_report(variants["auto"])
    return result


def show(result: dict) -> None:
    ms = ", ".join(f"{name} {value:.0f} ms" for name, value in result["ms"].items())
    print(f"hidden {result['hidden']}, {result['layers']} layers, {result['length']} tokens: {ms}", flush=True)
    for name, value in result.items():
        if isinstance(value, dict) and "median" in value:
            print(f"  {name:<14} {value['median']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]", flush=True)
    print(result["report"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="*", default=[256, 512])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    join()
    results = []
    for hidden in options.hidden:
        results.append(measure(hidden, options.layers, options.length, options.rounds))
        if dist.get_rank() == 0:
            show(results[-1])
    if dist.get_rank() == 0:
        write_record(options.json, {"results": results})
    destroy_groups()


if __name__ == "__main__":
    main()
