"""Host cost of a step by our plan and by PyTorch's dict, against the same step by hand and by PyTorch, interleaved in
one run.

    python -m benchmarks.host_overhead                              # fake process group: host time alone
    torchrun --nproc-per-node 2 -m benchmarks.host_overhead         # real processes

Measures forward + backward of a 4-layer Llama-like model (nested and flat blocks, with and without sequence
parallelism), then the optimizer step and gradient clipping. Every round times each variant once; ratios are medians
over rounds of ratios within a round, with a 95% interval of the median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import parallel as stock

from benchmarks import llama
from benchmarks.record import write_record
from benchmarks.timing import interleaved, ratio
from parallelize import clip_grad_norm_, destroy_groups, local_optimizer, parallelize_module

TP = 2


def start() -> bool:
    """Join torchrun's processes, or a fake group of two. Returns whether collectives are real."""
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


@dataclass(frozen=True)
class Setting:
    """One form of the model. Its variants: by hand, by our plan, by PyTorch's dict through us, by PyTorch itself."""

    flat: bool
    sequence_parallel: bool

    def __str__(self) -> str:
        return f"{'TP + SP' if self.sequence_parallel else 'TP'}, {'flat' if self.flat else 'nested'}"

    def model(self, variant: str, hidden: int, mesh: DeviceMesh) -> torch.nn.Module:
        torch.manual_seed(0)
        model = llama.Llama(hidden, flat=self.flat)
        if variant == "hand":
            return llama.by_hand(model, mesh.get_group(), self.sequence_parallel)
        if variant == "plan":
            return parallelize_module(model, mesh, llama.plan(flat=self.flat), sequence_parallel=self.sequence_parallel)
        apply = parallelize_module if variant == "dict" else stock.parallelize_module
        return apply(model, mesh, llama.stock_styles(self.sequence_parallel, self.flat))

    def step(self, variant: str, model: torch.nn.Module, ids: torch.Tensor, group: Any) -> Callable[[], None]:
        """Forward and backward."""
        sums_norms = variant == "hand" and self.sequence_parallel

        def run() -> None:
            logits = model(ids)
            F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1)).backward()
            if sums_norms:
                llama.sum_norms(model, group)
            for parameter in model.parameters():
                parameter.grad = None

        return run


SETTINGS = tuple(Setting(flat, sequence) for flat in (False, True) for sequence in (False, True))


def measure(hidden: int, rounds: int, inner: int, step_only: bool) -> dict:
    mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    names = ("hand", "plan", "dict") if step_only else ("hand", "plan", "dict", "stock")
    ids = torch.randint(0, 512, (2, 16 if hidden == 64 else 64), generator=torch.Generator().manual_seed(1))
    models = {(s, name): s.model(name, hidden, mesh) for s in SETTINGS for name in names}
    steps = {f"{name} {s}": s.step(name, model, ids, mesh.get_group()) for (s, name), model in models.items()}
    times = interleaved(steps, rounds, inner)
    result = {"hidden": hidden, "step_us": {name: statistics.median(t) * 1e6 for name, t in times.items()}}
    for setting in SETTINGS:
        for name in names[1:]:
            result[f"step {name}/hand, {setting}"] = ratio(times, f"{name} {setting}", f"hand {setting}")
    if step_only:
        return result
    hand, ours = models[SETTINGS[0], "hand"], models[SETTINGS[0], "plan"]
    for kind, keywords in (("fused", {"fused": True}), ("foreach", {"foreach": True}), ("loop", {"foreach": False})):
        result[f"AdamW {kind}, ours/hand"] = _optimizer(hand, ours, ids, rounds, keywords)
    for kind, foreach in (("foreach", True), ("loop", False)):
        result[f"clipping {kind}, ours/hand"] = _clipping(hand, ours, ids, rounds, foreach)
    return result


def _with_gradients(models: tuple[torch.nn.Module, ...], ids: torch.Tensor) -> None:
    for model in models:
        logits = model(ids)
        F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1)).backward()


def _optimizer(
    hand: torch.nn.Module, ours: torch.nn.Module, ids: torch.Tensor, rounds: int, keywords: dict
) -> dict[str, float]:
    _with_gradients((hand, ours), ids)
    steps = {
        "hand": torch.optim.AdamW(hand.parameters(), lr=1e-4, **keywords).step,
        "ours": local_optimizer(torch.optim.AdamW(ours.parameters(), lr=1e-4, **keywords)).step,
    }
    return ratio(interleaved(steps, rounds, 5), "ours", "hand")


def _clipping(
    hand: torch.nn.Module, ours: torch.nn.Module, ids: torch.Tensor, rounds: int, foreach: bool
) -> dict[str, float]:
    _with_gradients((hand, ours), ids)
    plain, planned = list(hand.parameters()), list(ours.parameters())

    def by_hand() -> None:  # a hand-written one sums the squares of sharded gradients over tp
        norms = torch.nn.utils.get_total_norm([p.grad for p in plain], foreach=foreach).square_()
        dist.all_reduce(norms)
        torch.nn.utils.clip_grads_with_norm_(plain, 1.0, norms.sqrt_(), foreach=foreach)

    work = {"hand": by_hand, "ours": lambda: clip_grad_norm_(planned, 1.0, foreach=foreach)}
    return ratio(interleaved(work, rounds, 5), "ours", "hand")


def show(result: dict) -> None:
    print(f"hidden {result['hidden']}", flush=True)
    for name, us in result["step_us"].items():
        print(f"  {name:<28} {us:7.0f} us", flush=True)
    for name, value in result.items():
        if isinstance(value, dict) and "median" in value:
            print(f"  {name:<34} {value['median']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="*", default=[64, 256, 512])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--inner", type=int, default=3)
    parser.add_argument("--step-only", action="store_true", help="just the step, without PyTorch: more rounds a minute")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    real = start()
    results = []
    for hidden in options.hidden:
        result = measure(hidden, options.rounds, options.inner, options.step_only)
        results.append(result)
        if dist.get_rank() == 0:
            show(result)
    if dist.get_rank() == 0:
        write_record(options.json, {"group": "gloo" if real else "fake", "tp": TP, "results": results})
    destroy_groups()


if __name__ == "__main__":
    main()
