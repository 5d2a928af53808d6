"""Host cost of a planned step against the same step by hand and by stock PyTorch, interleaved in one run.

    python -m benchmarks.host_overhead                              # fake process group: host time alone
    torchrun --nproc-per-node 2 -m benchmarks.host_overhead         # real processes

Measures forward + backward of a 4-layer Llama-like model, then the optimiser step and gradient clipping. Every round times
each variant once, in turn; ratios are medians over rounds of ratios within a round, with a 95% interval of the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import llama
from benchmarks.timing import interleaved, ratio
from parallelize import clip_grad_norm_, destroy_groups, local_optimizer, parallelize_module

TP = 2


def start() -> bool:
    """Join torchrun's processes, or a fake group of two. True where collectives are real."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", category=FutureWarning)
    real = "TORCHELASTIC_RUN_ID" in os.environ
    if real:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    return real


def variants(hidden: int, names: tuple[str, ...]) -> dict[str, torch.nn.Module]:
    mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    made = {}
    for name in names:
        torch.manual_seed(0)
        model = llama.Llama(hidden)
        if name == "hand":
            llama.by_hand(model, mesh.get_group())
        elif name == "stock":
            from torch.distributed.tensor.parallel import parallelize_module as stock

            stock(model, mesh, llama.stock_styles())
        else:
            parallelize_module(model, mesh, llama.plan())
        made[name] = model
    return made


def measure(hidden: int, rounds: int, inner: int, step_only: bool) -> dict:
    models = variants(hidden, ("hand", "ours") if step_only else ("hand", "stock", "ours"))
    ids = torch.randint(0, 512, (2, 16 if hidden == 64 else 64), generator=torch.Generator().manual_seed(1))

    def step(model: torch.nn.Module) -> Callable[[], None]:
        def run() -> None:
            logits = model(ids)
            F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1)).backward()
            for parameter in model.parameters():
                parameter.grad = None

        return run

    times = interleaved({name: step(model) for name, model in models.items()}, rounds, inner)
    found = {"hidden": hidden, "step_us": {name: statistics.median(t) * 1e6 for name, t in times.items()}}
    found["step ours/hand"] = ratio(times, "ours", "hand")
    if step_only:
        return found
    found["step stock/ours"] = ratio(times, "stock", "ours")
    for kind, keywords in (("fused", {"fused": True}), ("foreach", {"foreach": True}), ("loop", {"foreach": False})):
        found[f"AdamW {kind} ours/hand"] = _optimizer(models, ids, rounds, keywords)
    for kind, foreach in (("foreach", True), ("loop", False)):
        found[f"clipping {kind} ours/hand"] = _clipping(models, ids, rounds, foreach)
    return found


def _with_gradients(models: dict, ids: torch.Tensor) -> None:
    for name in ("hand", "ours"):
        logits = models[name](ids)
        F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1)).backward()


def _optimizer(models: dict, ids: torch.Tensor, rounds: int, keywords: dict) -> dict[str, float]:
    _with_gradients(models, ids)
    hand = torch.optim.AdamW(models["hand"].parameters(), lr=1e-4, **keywords)
    ours = local_optimizer(torch.optim.AdamW(models["ours"].parameters(), lr=1e-4, **keywords))
    return ratio(interleaved({"hand": hand.step, "ours": ours.step}, rounds, 5), "ours", "hand")


def _clipping(models: dict, ids: torch.Tensor, rounds: int, foreach: bool) -> dict[str, float]:
    _with_gradients(models, ids)
    hand, ours = list(models["hand"].parameters()), list(models["ours"].parameters())

    def by_hand() -> None:  # a hand-written one sums the squares of sharded gradients over tp
        norms = torch.nn.utils.get_total_norm([p.grad for p in hand], foreach=foreach).square_()
        dist.all_reduce(norms)
        torch.nn.utils.clip_grads_with_norm_(hand, 1.0, norms.sqrt_(), foreach=foreach)

    work = {"hand": by_hand, "ours": lambda: clip_grad_norm_(ours, 1.0, foreach=foreach)}
    return ratio(interleaved(work, rounds, 5), "ours", "hand")


def show(found: dict) -> None:
    us = found["step_us"]
    print(f"hidden {found['hidden']}: " + ", ".join(f"{name} {us[name]:.0f} us" for name in us), flush=True)
    for name, value in found.items():
        if isinstance(value, dict) and "median" in value:
            print(f"  {name:<28} {value['median']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="*", default=[64, 256, 512])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--inner", type=int, default=3)
    parser.add_argument("--step-only", action="store_true", help="just the step, by hand and ours: more pairs a minute")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    real = start()
    results = []
    for hidden in options.hidden:
        found = measure(hidden, options.rounds, options.inner, options.step_only)
        results.append(found)
        if dist.get_rank() == 0:
            show(found)
    if options.json and dist.get_rank() == 0:
        about = {"group": "gloo" if real else "fake", "torch": torch.__version__, "tp": TP}
        options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    destroy_groups()


if __name__ == "__main__":
    main()
