"""Pipelines: the measured bubble against the simulated one, and the runtime's cost against PyTorch's.

    torchrun --nproc-per-node 4 -m benchmarks.pipeline --bubble        # stages that sleep: on any number of cores
    torchrun --nproc-per-node 2 -m benchmarks.pipeline                 # real matmuls, against torch.distributed.pipelining

The first compares the bubble measured with the one simulated from the same costs. The second runs the same blocks, loss
and microbatches by both runtimes in one process group, interleaved; the ratio of step times is per round.
"""  # noqa: E501

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from benchmarks.record import write_record
from benchmarks.timing import interleaved, join, medians_ms, ratio
from parallelize import Pipeline, build_mesh, cut_pipeline, destroy_groups, simulate
from parallelize.axes.pipeline.schedule_chart import draw
from parallelize.axes.pipeline.timeline import Costs
from parallelize.plan.schema import Cuts
from parallelize.plan.stage_ranks import SCHEDULES

LAYERS = Cuts("layers", first=("start",))
WARM, ROUNDS = 1, 3


class _Wait(Function):
    """Takes time in forward and backward, without using a core."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        time.sleep(ctx.backward_s)
        return grad, None, None


class Sleeper(nn.Module):
    """A layer whose forward, dgrad and wgrad each take `seconds`."""

    def __init__(self, seconds: float):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Wait.apply(x, self.seconds, self.seconds) + _Wait.apply(self.weight, 0.0, self.seconds)


class Start(nn.Module):
    """Like an embedding: makes the first stage compute gradients of its layers' inputs too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class Stack(nn.Module):
    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.start = Start()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return x


def squares(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).pow(2).sum()


def stages_of(name: str) -> int:
    return SCHEDULES[name].stages_per_rank


def ours(layers: list[nn.Module], name: str, microbatches: int) -> Pipeline:
    model = Stack(layers)
    mesh = build_mesh("cpu", pp=dist.get_world_size())
    cut_pipeline(model, mesh, cuts=LAYERS, schedule=name)
    return Pipeline(model, mesh, schedule=name, num_microbatches=microbatches, loss=squares, count=lambda y: y.numel())


def bubbles(microbatches: int, seconds: float, picture: Path | None) -> list[dict[str, Any]]:
    """Measured and simulated bubble of each schedule."""
    results = []
    for name in SCHEDULES:
        stages = stages_of(name) * dist.get_world_size()
        pipeline = ours([Sleeper(seconds / stages_of(name)) for _ in range(stages)], name, microbatches)
        pipeline.record = True
        x = torch.zeros(microbatches, 4)
        measured = []
        for _ in range(WARM + ROUNDS):
            dist.barrier()
            pipeline.step(x, targets=x)
            measured.append(pipeline.timeline())
        timeline = sorted(measured[WARM:], key=lambda each: each.bubble_fraction)[ROUNDS // 2]
        # the first stage has no dgrad: all of its backward is wgrad
        backward_costs = {"input": [0.0] + [1.0] * (stages - 1), "weight": [2.0] + [1.0] * (stages - 1)}
        simulated = simulate(pipeline.schedule, Costs(forward=1.0, backward=2.0, **backward_costs))
        results.append(
            {
                "schedule": name,
                "measured": timeline.bubble_fraction,
                "arithmetic": simulated.bubble_fraction,
                "ratio": timeline.bubble_fraction / simulated.bubble_fraction,
                "step_ms": timeline.makespan * 1e3,
                "in_flight": list(simulated.in_flight.ranks),
            }
        )
        if picture is not None and dist.get_rank() == 0:
            picture.mkdir(parents=True, exist_ok=True)
            draw(timeline, picture / f"{name}_measured.svg", f"{name}, measured", unit="ms")
            draw(simulated, picture / f"{name}.svg", name)
    return results


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def theirs(layers: list[nn.Module], name: str, microbatches: int, x: torch.Tensor, count: int) -> Any:
    """PyTorch's stages and schedule, by hand."""
    cls = get_schedule_class(SCHEDULES[name].torch_name)
    world, rank, per_rank = dist.get_world_size(), dist.get_rank(), stages_of(name)
    stages = world * per_rank
    if SCHEDULES[name].v_shape:
        stage_indices = [rank, stages - 1 - rank]
    else:
        stage_indices = [rank + world * n for n in range(per_rank)]
    per_stage = len(layers) // stages
    first_stage = [Start()]
    built = [
        PipelineStage(
            nn.Sequential(*(first_stage if stage == 0 else []), *layers[stage * per_stage : (stage + 1) * per_stage]),
            stage,
            stages,
            torch.device("cpu"),
        )
        for stage in stage_indices
    ]
    local_stages = built[0] if per_rank == 1 else built
    schedule = cls(local_stages, microbatches, loss_fn=lambda out, y: squares(out, y) / count, scale_grads=False)
    first, last = 0 in stage_indices, stages - 1 in stage_indices

    def step() -> None:
        schedule.step(*([x] if first else []), target=x if last else None, losses=[] if last else None)

    return step, built


def against_pytorch(args: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    x = torch.randn(args.microbatches * args.rows, args.width)
    for name in SCHEDULES:
        stages = stages_of(name) * dist.get_world_size()
        count = args.layers // stages * stages
        torch.manual_seed(0)
        pipeline = ours([Block(args.width) for _ in range(count)], name, args.microbatches)
        torch.manual_seed(0)
        step, built = theirs([Block(args.width) for _ in range(count)], name, args.microbatches, x, x.numel())
        pipeline.step(x, targets=x)
        step()
        our_grads = [p.grad for p in pipeline.module.parameters()]
        their_grads = sorted(
            (stage.stage_index, n, p.grad) for stage in built for n, p in stage.submod.named_parameters()
        )
        pairs = {tuple(a.shape): float(a.abs().sum()) for a in our_grads}
        other = {tuple(a.shape): float(a.abs().sum()) for *_, a in their_grads}
        assert all(abs(pairs[s] - other[s]) <= 1e-3 * other[s] for s in other), (name, pairs, other)

        def run_ours(pipeline: Pipeline = pipeline) -> None:
            pipeline.step(x, targets=x)
            pipeline.module.zero_grad()

        def run_theirs(step: Any = step, built: list = built) -> None:
            step()
            for stage in built:
                stage.submod.zero_grad()

        times = interleaved({"ours": run_ours, "pytorch": run_theirs}, args.rounds, before=dist.barrier)
        results.append({"schedule": name, **medians_ms(times), "ratio": ratio(times, "ours", "pytorch")})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bubble", action="store_true")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ms", type=float, default=120.0, help="of a stage's forward (with --bubble)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    join()
    results = bubbles(args.microbatches, args.ms / 1e3, args.pictures) if args.bubble else against_pytorch(args)
    if dist.get_rank() == 0:
        world = dist.get_world_size()
        for result in results:
            if args.bubble:
                print(
                    f"{result['schedule']:<24} bubble {result['measured']:.3f}  arithmetic {result['arithmetic']:.3f}  "
                    f"ratio {result['ratio']:.3f}  step {result['step_ms']:.0f} ms"
                )
            else:
                r = result["ratio"]
                print(
                    f"{result['schedule']:<24} ours {result['ours']:7.1f} ms  PyTorch {result['pytorch']:7.1f} ms  "
                    f"ratio {r['median']:.3f} [{r['low']:.3f}, {r['high']:.3f}]"
                )
        write_record(args.json, {"ranks": world, "microbatches": args.microbatches, "results": results})
    destroy_groups()


if __name__ == "__main__":
    main()
