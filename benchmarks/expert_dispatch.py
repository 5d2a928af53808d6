"""How much of the messages of a block of experts is hidden: a block of DeepSeek-V3, whose shared experts are computed
beside them.

    torchrun --nproc-per-node 2 -m benchmarks.expert_dispatch
    sudo python -m benchmarks.slow_link --rate 1gbit -- -m benchmarks.expert_dispatch

Forward and backward of one block with whole experts on each rank, in one interleaved run:

| contender | what runs |
| --- | --- |
| block | by the shipped plan, in chunks, shared experts beside the last results |
| after | the same without `beside`: nothing is computed while the last results return |
| one piece | the same as `after` without chunks |
| messages | the rows that the block sent, alone: those of forward all at once, then those of backward |
| compute | the block, whose messages are answered at once with what arrived before (the counts are exchanged) |
| both | the same, and each message is sent too, and waited for when the step has ended: what the cores can do at best |

`hidden` is the longer of `messages` and `compute` over `block`: 1 where all of the shorter is hidden. Gloo's packets
take time of the cores that compute, which no order of work can hide: `of both` is `both` over `block`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.expert_block import step_of
from benchmarks.record import write_record
from benchmarks.timing import Times, interleaved, join, medians_ms, ratio
from parallelize import build_mesh, destroy_groups, parallelize_module
from parallelize.comm.groups import Group
from parallelize.ops.experts import transfers
from parallelize.ops.experts.transfers import RowsInFlight, start_exchange

T = torch.Tensor
PLAN = {"gate": "sequence", "shared_experts.{gate,up}_proj": "colwise", "shared_experts.down_proj": "rowwise"}
EXPERTS = {
    "block": ("experts(beside=shared_experts)", "chunked"),
    "after": ("experts", "chunked"),
    "one piece": ("experts", "off"),
}


def stock(options: argparse.Namespace) -> nn.Module:
    """A block of experts, with one shared expert of several times their width."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=options.hidden,
        moe_intermediate_size=options.width,
        n_routed_experts=options.experts,
        num_experts_per_tok=options.choices,
        n_shared_experts=options.shared,
        n_group=1,
        topk_group=1,
    )
    config._experts_implementation = "grouped_mm"
    block = DeepseekV3MoE(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


class Messages:
    """Records the messages of a block, then answers them at once, or sends them alone."""

    def __init__(self) -> None:
        self.sent: list[tuple[T, list[int], list[int], Group]] = []
        self.answers: list[T] = []
        self.in_flight: list[RowsInFlight] = []
        self.next = 0

    def record(self, x: T, sent: list[int], received: list[int], group: Group) -> RowsInFlight:
        flight = start_exchange(x, sent, received, group)
        self.sent.append((x.clone(), sent, received, group))
        self.answers.append(flight.wait().clone())
        return flight

    def answer(self, x: T, sent: list[int], received: list[int], group: Group) -> RowsInFlight:
        rows = self.answers[self.next % len(self.answers)]
        self.next += 1
        return RowsInFlight(rows)

    def answer_and_send(self, x: T, sent: list[int], received: list[int], group: Group) -> RowsInFlight:
        self.in_flight.append(start_exchange(x, sent, received, group))
        return self.answer(x, sent, received, group)

    def wait(self) -> None:
        while self.in_flight:
            self.in_flight.pop().wait()

    def send(self) -> None:
        half = len(self.sent) // 2
        for messages in (self.sent[:half], self.sent[half:]):
            for flight in [start_exchange(*message) for message in messages]:
                flight.wait()


def planned(options: argparse.Namespace, name: str) -> nn.Module:
    style, overlap = EXPERTS[name]
    mesh, ranks = build_mesh("cpu", dp=dist.get_world_size(), tp=1), dist.get_world_size()
    plan = {**PLAN, "experts": style}
    return parallelize_module(stock(options), mesh, plan, ep=ranks, overlap=overlap, own_reduction=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x, grad = (torch.randn(1, options.tokens, options.hidden, generator=generator) for _ in range(2))
    steps = {name: step_of(planned(options, name), x.clone().requires_grad_(), grad) for name in EXPERTS}
    messages = Messages()
    with mock.patch.object(transfers, "start_exchange", messages.record):
        expected = steps["block"]()
    compare(expected, {name: step() for name, step in steps.items()})
    work: dict[str, Callable[[], object]] = {**steps, "messages": messages.send}

    def compute() -> None:
        with mock.patch.object(transfers, "start_exchange", messages.answer):
            steps["block"]()

    def both() -> None:
        with mock.patch.object(transfers, "start_exchange", messages.answer_and_send):
            steps["block"]()
        messages.wait()

    times = interleaved({**work, "compute": compute, "both": both}, options.rounds, inner=2, before=dist.barrier)
    bytes_sent = sum(x.numel() * x.element_size() for x, *_ in messages.sent)
    result: dict[str, Any] = {**vars(options), "ranks": dist.get_world_size(), "ms": medians_ms(times)}
    result |= {"rows_bytes": bytes_sent, "hidden": hidden(times), "of both": ratio(times, "both", "block")}
    return result | {f"{name}/block": ratio(times, name, "block") for name in ("after", "one piece")}


def hidden(times: Times) -> dict[str, float]:
    limit = max(statistics.median(times[name]) for name in ("messages", "compute"))
    longer = "messages" if statistics.median(times["messages"]) == limit else "compute"
    return {**ratio(times, longer, "block"), "of compute": float(longer == "compute")}


def compare(expected: list[T], results: dict[str, list[T]]) -> None:
    """Raises: AssertionError where outputs or gradients differ."""
    for name, actual in results.items():
        for a, b in zip(actual, expected, strict=True):
            error = float((a - b).abs().max() / b.abs().max())
            assert error < 1e-4, (name, tuple(b.shape), error)


def show(result: dict[str, Any]) -> None:
    ms = ", ".join(f"{name} {value:.1f} ms" for name, value in result["ms"].items())
    print(f"{result['ranks']} ranks, {result['tokens']} tokens on each: {ms}", flush=True)
    for name in ("hidden", "of both", "after/block", "one piece/block"):
        value = result[name]
        print(f"  {name:<16} {value['median']:.3f}  [{value['low']:.3f}, {value['high']:.3f}]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=128, help="of one expert")
    parser.add_argument("--shared", type=int, default=2, help="width of the shared expert, in widths of an expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--choices", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=12)
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
