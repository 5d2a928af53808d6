"""Overlapped linears against the same without overlap, against PyTorch, and against a bound of the machine.

    torchrun --nproc-per-node 2 -m benchmarks.collective_matmul
    sudo python -m benchmarks.slow_link --rate 1gbit -- -m benchmarks.collective_matmul --json out.json --plot out.svg

For each shape, `link` is one phase of messages alone, by the cheapest exchange, and `compute` one matmul alone. The
limit of a pass is the larger of its messages and its matmuls; passes add up. `unbound` runs the same messages and
matmuls pass by pass, neither waiting for the other: what perfect overlap would take on these cores, which also serve
the network. `sync` is this package without overlap, `chunked/n` with n chunks per shard, `auto` what the calibration
chose, `stock` PyTorch's all-gather then `F.linear`, or `F.linear` then reduce-scatter. Every round times each variant
once, in random order; figures are medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import svg
from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import all_gather_linear, destroy_groups, linear_all_reduce, linear_reduce_scatter
from parallelize.comm.groups import Group
from parallelize.comm.p2p import Exchange
from parallelize.ops.matmul.calibrate import profile_of

T = torch.Tensor
SQUARE = (2048, 2048, 2048)
GRID = [SQUARE, (2048, 1024, 4096), (2048, 2048, 512), (2048, 512, 2048), (1024, 256, 1024), (4096, 1024, 512)]
# op -> (phases of messages, matmuls) of forward and of backward
PASSES = {
    "all_gather_linear": ((1, 1), (1, 2)),
    "linear_reduce_scatter": ((1, 1), (1, 2)),
    "linear_all_reduce": ((2, 1), (0, 2)),
}
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Shape:
    """[rows, inner] times [outs, inner] on this rank: for a gather `inner` is full and `outs` sharded, else the
    reverse."""

    def __init__(self, op: str, rows: int, inner: int, outs: int, group: Group):
        self.op, self.group, self.rows, self.size = op, group, rows, group.size
        random = torch.Generator().manual_seed(group.rank)
        gathers = op == "all_gather_linear"
        self.inner, self.outs = (inner, outs // self.size) if gathers else (inner // self.size, outs)
        self.x = torch.randn(rows // self.size if gathers else rows, self.inner, generator=random)
        self.weight = torch.randn(self.outs, self.inner, generator=random)
        self.upstream = torch.randn(
            rows // self.size if op == "linear_reduce_scatter" else rows, self.outs, generator=random
        )
        self.sent_features = self.inner if gathers else self.outs  # of the tokens that are sent

    def call(self, overlap: str, chunks: int | None = None) -> Callable[[T, T], T]:
        function = {
            "all_gather_linear": all_gather_linear,
            "linear_reduce_scatter": linear_reduce_scatter,
            "linear_all_reduce": linear_all_reduce,
        }[self.op]
        return lambda x, weight: function(x, weight, group=self.group, overlap=overlap, chunks=chunks)

    def stock(self, x: T, weight: T) -> T:
        if self.op == "all_gather_linear":
            gathered = x.new_empty(self.rows, self.inner)
            _all_gather(gathered, x)
            return F.linear(gathered, weight)
        out = F.linear(x, weight)
        if self.op == "linear_all_reduce":
            dist.all_reduce(out)
            return out
        shard = out.new_empty(self.rows // self.size, self.outs)
        _reduce_scatter(shard, out)
        return shard

    def forward(self, function: Callable[[T, T], T]) -> Callable[[], object]:
        return lambda: function(self.x, self.weight)

    def both(self, function: Callable[[T, T], T]) -> Callable[[], object]:
        x, weight = self.x.clone().requires_grad_(), self.weight.clone().requires_grad_()

        def run() -> None:
            function(x, weight).backward(self.upstream)
            x.grad = weight.grad = None

        return run

    def link(self) -> Callable[[], None]:
        """The cheapest exchange: each rank sends one shard of the tokens to each peer."""
        sent = torch.ones(self.rows // self.size, self.sent_features)
        received = {rank: torch.empty_like(sent) for rank in range(self.size) if rank != self.group.rank}

        def run() -> None:
            with Exchange(self.group) as link:
                link.post(dict.fromkeys(received, sent), received)

        return run

    def compute(self) -> Callable[[], object]:
        x = torch.randn(self.rows, self.inner)
        return lambda: F.linear(x, self.weight)

    def unbound(self, backward: bool) -> Callable[[], None]:
        """The messages of each pass posted first, and its matmuls computed from other tensors meanwhile."""
        sent = torch.ones(self.rows // self.size, self.sent_features)
        x, upstream = torch.randn(self.rows, self.inner), torch.randn(self.rows, self.outs)
        factors = [(x, self.weight.t()), (upstream, self.weight), (upstream.t(), x)]
        outs = [left @ right for left, right in factors]  # new memory in each call would cost more than a message
        matmuls = [partial(torch.mm, *pair, out=out) for pair, out in zip(factors, outs, strict=True)]
        passes, first = [], 0
        for phases, count in PASSES[self.op][: 2 if backward else 1]:
            received = [
                {rank: torch.empty_like(sent) for rank in range(self.size) if rank != self.group.rank}
                for _ in range(phases)
            ]
            passes.append((received, matmuls[first : first + count]))
            first += count

        def run() -> None:
            for received, computed in passes:
                with Exchange(self.group) as link:
                    for buffers in received:
                        link.post(dict.fromkeys(buffers, sent), buffers)
                    for matmul in computed:
                        matmul()

        return run


def measure(op: str, dims: tuple[int, int, int], chunks: list[int], rounds: int, backward: bool) -> dict:
    """One shape: milliseconds of each variant, and their ratios."""
    shape = Shape(op, *dims, Group(dist.group.WORLD))  # type: ignore[arg-type]
    passes = shape.both if backward else shape.forward
    work: dict[str, Callable[[], object]] = {
        "link": shape.link(),
        "compute": shape.compute(),
        "unbound": shape.unbound(backward),
        "sync": passes(shape.call("off")),
        **{f"chunked/{n}": passes(shape.call("chunked", n)) for n in chunks},
        "auto": passes(shape.call("auto")),
    }
    if not backward:
        work["stock"] = shape.forward(shape.stock)
    times = interleaved(work, rounds, before=dist.barrier)
    ms = medians_ms(times)
    best = min((f"chunked/{n}" for n in chunks), key=ms.__getitem__)
    better = best if ms[best] < ms["sync"] else "sync"
    needs = PASSES[op][: 2 if backward else 1]
    limit = sum(max(phases * ms["link"], matmuls * ms["compute"]) for phases, matmuls in needs)
    result = {
        "op": op + (" forward+backward" if backward else ""),
        "rows, inner, outs": dims,
        "ms": ms,
        "limit_ms": limit,
        "compute/link": sum(n for _, n in needs) * ms["compute"] / (sum(n for n, _ in needs) * ms["link"]),
        "best chunked": best,
        "efficiency": {name: limit / value for name, value in ms.items() if name not in ("link", "compute", "unbound")},
        "chunked/unbound": ratio(times, best, "unbound"),
        "auto/unbound": ratio(times, "auto", "unbound"),
        "sync/chunked": ratio(times, "sync", best),
        "auto/better": ratio(times, "auto", better),
    }
    if not backward:
        result["stock/chunked"] = ratio(times, "stock", best)
    return result


def show(result: dict) -> None:
    ms = result["ms"]
    print(f"{result['op']} {result['rows, inner, outs']}: compute/link {result['compute/link']:.2f}", flush=True)
    print("   " + "  ".join(f"{name} {value:.1f}" for name, value in ms.items()) + " ms", flush=True)
    best = result["best chunked"]
    over = ms[best] / result["limit_ms"]
    line = f"   {best}: {over:.2f} x limit"
    for key in ("chunked/unbound", "sync/chunked", "stock/chunked", "auto/better"):
        if key in result:
            line += f", {key} {result[key]['median']:.2f} [{result[key]['low']:.2f}, {result[key]['high']:.2f}]"
    print(line, flush=True)


def draw(path: Path, results: list[dict], title: str) -> None:
    """Efficiency (limit over time) over the ratio of compute to communication, forward ops."""
    series: dict[str, list[tuple[float, float]]] = {"chunked": [], "auto": [], "sync": [], "PyTorch": []}
    for result in results:
        if "stock" in result["ms"]:
            at = result["compute/link"]
            names = (result["best chunked"], "auto", "sync", "stock")
            for values, name in zip(series.values(), names, strict=True):
                values.append((at, result["efficiency"][name]))
    svg.points(path, title, "compute / communication", "limit / time", series)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--chunks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--square", action="store_true", help="only the 2048 x 2048 shape")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("ROWS", "INNER", "OUTS"), help="only this shape")
    parser.add_argument("--ops", nargs="*", default=["all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG of efficiency over the ratio of compute to communication")
    parser.add_argument("--title", default="Collective matmul, two ranks")
    options = parser.parse_args()
    join()
    group = Group(dist.group.WORLD)  # type: ignore[arg-type]
    profile = profile_of(group, torch.float32, torch.device("cpu"))
    results = []
    first = dist.get_rank() == 0
    if first:
        print(f"calibrated: {profile}", flush=True)
    shapes = [tuple(options.shape)] if options.shape else [SQUARE] if options.square else GRID
    for dims in shapes:
        for op in options.ops:
            for backward in (False, True):
                result = measure(op, dims, options.chunks, options.rounds, backward)
                results.append(result)
                if first:
                    show(result)
    if first:
        about = {"title": options.title, "ranks": group.size, "profile": profile.as_dict()}
        write_record(options.json, {**about, "results": results})
    if first and options.plot:
        draw(options.plot, results, options.title)
    destroy_groups()


if __name__ == "__main__":
    main()
