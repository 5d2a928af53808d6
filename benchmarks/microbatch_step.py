"""A training step of several microbatches over a slow link, beside the time that it takes at the least.

    sudo python -m benchmarks.slow_link --rate 1gbit -- -m benchmarks.microbatch_step --hidden 256 512 --rate 1e9
    torchrun --nproc-per-node 2 -m benchmarks.microbatch_step --flat

All do the same on one Llama-like model, tensor and sequence parallel: PyTorch's styles, the model written by hand, this
toolkit without overlap, with chunks, and with microbatches beside each other. The parts are measured in the same
rounds: "compute" is this toolkit's step over a group that sends nothing (arithmetic and host), the bytes on the wire
are those of the network interface, and "unbound" is the compute while as many bytes are exchanged, neither waiting for
the other: what perfect overlap would take on these cores, which also serve the network.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module as stock_parallelize
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

from benchmarks import llama
from benchmarks.record import write_record
from benchmarks.timeline import sent_bytes
from benchmarks.timing import Times, interleaved, join, medians_ms, ratio
from parallelize import destroy_groups, parallelize_model
from parallelize.comm.groups import Group
from parallelize.comm.p2p import Exchange

_MESSAGE = 1 << 21
OURS: dict[str, dict[str, Any]] = {
    "sync": {},
    "chunked": {"overlap": "chunked"},
    "paired": {"overlap": "auto", "overlap_microbatches": True},
}
AUTO = {"auto": {"overlap": "auto", "overlap_microbatches": "auto"}}
Step = Callable[[], float]


class Steps:
    """The step of each variant on equal weights and data."""

    def __init__(self, options: argparse.Namespace, hidden: int):
        self.options, self.hidden = options, hidden
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 512, (options.microbatches, options.length), generator=generator)
        self.targets = self.ids.roll(-1, 1)
        self.models: dict[str, torch.nn.Module] = {}

    def all(self) -> dict[str, Step]:
        steps = {"stock": self.stock(), "hand": self.by_hand()}
        steps |= {name: self.ours(name, self.mesh, keywords) for name, keywords in self.options.ours.items()}
        silent = dist.new_group(list(range(dist.get_world_size())), backend="fake")
        mesh = DeviceMesh.from_group(silent, "cpu", mesh_dim_names=("tp",))
        compute = self.ours("compute", mesh, {"overlap": "chunked", "check_replicated": False})
        return steps | {"compute": compute, "unbound": self.unbound(compute, steps["paired"])}

    def unbound(self, compute: Step, step: Step) -> Step:
        """The compute beside the bytes of a step that do not depend on it."""
        num_bytes = torch.tensor(_sent_by(step) or 0)
        dist.all_reduce(num_bytes, dist.ReduceOp.MAX)  # an interface counts what was sent again, too
        group = Group(self.mesh.get_group("tp"))
        peers = [rank for rank in range(group.size) if rank != group.rank]
        messages = round(int(num_bytes) / _MESSAGE / len(peers))
        sent, received = torch.zeros(_MESSAGE // 4), {peer: torch.empty(_MESSAGE // 4) for peer in peers}

        def run() -> float:
            with Exchange(group) as exchange:  # leaving it waits for all messages
                for _ in range(messages):
                    exchange.post(dict.fromkeys(peers, sent), received)
                return compute()

        return run

    def _model(self, name: str) -> llama.Llama:
        torch.manual_seed(0)
        model = self.models[name] = llama.Llama(self.hidden, self.options.layers, flat=self.options.flat)
        return model

    def stock(self) -> Step:
        model = self._model("stock")
        stock_parallelize(model, self.mesh, llama.stock_styles(sequence_parallel=True, flat=self.options.flat))
        return self._in_order(model, lambda: None)

    def by_hand(self) -> Step:
        group = self.mesh.get_group("tp")
        model = llama.by_hand(self._model("hand"), group, sequence_parallel=True)
        return self._in_order(model, lambda: llama.sum_norms(model, group))

    def _in_order(self, model: torch.nn.Module, after: Callable[[], None]) -> Step:
        def run() -> float:
            total = 0.0
            model.zero_grad()
            for ids, targets in zip(self.ids.split(1), self.targets.split(1), strict=True):
                logits = model(ids)
                loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1)) / len(self.ids)
                loss.backward()
                total += loss.item()
            after()
            return total

        return run

    def ours(self, name: str, mesh: DeviceMesh, keywords: dict[str, Any]) -> Step:
        chosen = {"num_microbatches": len(self.ids), "sequence_parallel": not self.options.dict} | keywords
        plan = (
            llama.stock_styles(sequence_parallel=True, flat=self.options.flat)
            if self.options.dict
            else llama.plan(flat=self.options.flat)
        )
        parallel = parallelize_model(self._model(name), mesh, plan, **chosen)

        def run() -> float:
            parallel.module.zero_grad()
            return float(parallel.step(self.ids, targets=self.targets))

        while (trial := parallel.pipeline.pair_trial) is not None and trial.is_running:
            run()
        return run


def check(steps: dict[str, Step], models: dict[str, torch.nn.Module]) -> None:
    """Equal losses and gradient norms, or the times compare different things."""
    losses = {name: step() for name, step in steps.items() if name not in ("compute", "unbound")}
    norms = {name: _norms(models[name]) for name in losses}
    for name in losses:
        assert abs(losses[name] - losses["stock"]) < 1e-5 * losses["stock"], losses
        for mine, stock in zip(norms[name], norms["sync"], strict=True):
            assert name in ("stock", "hand") or abs(mine - stock) < 1e-4 * max(stock, 1e-3), name


def _norms(model: torch.nn.Module) -> list[float]:
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [float(grad.norm()) for grad in gradients]  # type: ignore[union-attr]


def _sent_by(step: Step) -> int | None:
    """The bytes that this rank sends in a step; None where the interface does not tell."""
    step()
    before = sent_bytes()
    step()
    after = sent_bytes()
    return None if before is None or after is None else after - before


def measure(options: argparse.Namespace, hidden: int) -> dict[str, Any]:
    made = Steps(options, hidden)
    steps = made.all()
    check(steps, made.models)
    times = interleaved(steps, options.rounds, before=dist.barrier)
    result: dict[str, Any] = {"hidden": hidden, "layers": options.layers, "ms": medians_ms(times), "flat": options.flat}
    result["dict"] = options.dict
    result |= {"length": options.length, "microbatches": options.microbatches, "ranks": dist.get_world_size()}
    for name in options.ours:
        result[f"stock/{name}"] = ratio(times, "stock", name)
        result[f"hand/{name}"] = ratio(times, "hand", name)
    sent = _sent_by(steps["paired"])
    if sent is not None:
        wire_s = sent * 8 / options.rate
        result["wire ms"] = wire_s * 1e3
        result |= {f"{name}/limit": _of_limit(times, name, wire_s) for name in options.ours}
        result |= {f"{name}/unbound": ratio(times, name, "unbound") for name in options.ours}
    return result


def _of_limit(times: Times, name: str, wire_s: float) -> float:
    """Median over rounds of a time over the larger of the round's compute and the wire's time."""
    return statistics.median(t / max(c, wire_s) for t, c in zip(times[name], times["compute"], strict=True))


def show(result: dict[str, Any]) -> None:
    ms = ", ".join(f"{name} {value:.0f} ms" for name, value in result["ms"].items())
    wire = f", on the wire {result['wire ms']:.0f} ms" if "wire ms" in result else ""
    print(
        f"hidden {result['hidden']}, {result['microbatches']} microbatches of {result['length']}: {ms}{wire}",
        flush=True,
    )
    for name, value in result.items():
        if isinstance(value, dict) and "median" in value:
            print(f"  {name:<14} {value['median']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]", flush=True)
        elif name.endswith("/limit"):
            print(f"  {name:<14} {value:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="*", default=[256, 512])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--flat", action="store_true", help="blocks without modules inside")
    parser.add_argument("--dict", action="store_true", help="ours by PyTorch's dict of styles instead of a plan")
    parser.add_argument("--auto", action="store_true", help='also with overlap_microbatches="auto"')
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e9, help="of the link, bits a second")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.ours = OURS | (AUTO if options.auto else {})
    join()
    results = []
    for hidden in options.hidden:
        results.append(measure(options, hidden))
        if dist.get_rank() == 0:
            show(results[-1])
    if dist.get_rank() == 0:
        write_record(options.json, {"results": results})
    destroy_groups()


if __name__ == "__main__":
    main()
