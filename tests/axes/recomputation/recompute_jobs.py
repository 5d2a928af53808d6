"""Jobs of `test_recompute_processes.py`: each runs on every rank of a pool of gloo processes."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from parallelize import build_mesh, parallelize_module
from parallelize.axes.recomputation.recompute import recompute, recompute_cost
from tests.support.live import saved_bytes
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import loss_of

CONFIGURATIONS: list[dict[str, Any]] = [{}, {"mode": "selective", "save": "collectives"}, {"mode": "selective"}]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run(net: nn.Module, steps: int = 2, seed: int = 0) -> list[torch.Tensor]:
    """Loss and this rank's gradients of some SGD steps."""
    results = []
    torch.manual_seed(seed)
    for step in range(steps):
        ids, labels = tiny_batch(seed=step + seed)
        net.zero_grad()
        loss = loss_of(net(input_ids=ids, use_cache=False).logits, labels)
        loss.backward()
        results += [loss.detach(), *(local(p.grad).clone() for p in net.parameters() if p.grad is not None)]
        torch.optim.SGD(net.parameters(), 0.05).step()
    return results


def differing(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    assert len(actual) == len(expected)
    return sum(not torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def fully_sharded(rank: int, when: str, mixed: bool, inner: bool) -> list[tuple[int, int, int]]:
    """dp=2 x tp=2: `fully_shard` on units `when` ("before" or "after") recompute, and on an inner module too.

    Returns: for each way (tensors that differ, forwards, replays).
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = tiny_model("llama"), build_mesh("cpu", dp=2, tp=2)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()

    def made(how: dict[str, Any] | None) -> nn.Module:
        net = parallelize_module(copy.deepcopy(model), mesh, sequence_parallel=True)
        if when == "after" and how is not None:
            recompute(net, **how)
        for layer in net.model.layers:
            if inner:
                fully_shard(layer.mlp, mesh=mesh["dp"], mp_policy=policy)
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(net, mesh=mesh["dp"], mp_policy=policy)
        if when == "before" and how is not None:
            recompute(net, **how)
        return net

    seed = mesh.get_local_rank("dp")
    expected, results = run(made(None), seed=seed), []
    for how in CONFIGURATIONS:
        net = made(how)
        differs = differing(run(net, seed=seed), expected)
        costs = recompute_cost(net).values()
        results.append((differs, sum(cost.forwards for cost in costs), sum(cost.replays for cost in costs)))
    return results


class Redistributes(nn.Module):
    """Communicates by itself, through DTensor."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.mesh = build_mesh("cpu", tp=2)

    def forward(self, x):
        part = DTensor.from_local(torch.tanh(self.inner(x)), self.mesh, [Shard(0)])
        return torch.tanh(part.redistribute(placements=[Replicate()]).to_local())


def functional(rank: int) -> list[tuple[int, int]]:
    """A unit's own functional collectives: (tensors that differ, collectives more than without recompute), by way."""
    model, x = nn.ModuleDict({"unit": Redistributes()}), torch.randn(3, 8)
    results, plain = [], None
    for how in (None, {}, {"mode": "selective", "save": "functional_collectives"}):
        net = copy.deepcopy(model)
        if how is not None:
            recompute(net, units="unit", **how)
        with CommDebugMode() as mode:
            net["unit"](x).sum().backward()
        now = [net["unit"].inner.weight.grad], mode.get_total_counts()
        plain = plain or now
        results.append((differing(now[0], plain[0]), now[1] - plain[1]))
    return results


def saved(rank: int) -> tuple[int, int]:
    """(bytes more than a full recompute keeps, bytes that are reported as kept) where collectives are."""
    model = parallelize_module(
        tiny_model("llama", num_hidden_layers=6), build_mesh("cpu", tp=2), sequence_parallel=True
    )
    full, saving_model = (
        recompute(copy.deepcopy(model)),
        recompute(copy.deepcopy(model), "selective", save="collectives"),
    )
    more = saved_bytes(saving_model)[0] - saved_bytes(full)[0]
    return more, sum(cost.collective_bytes for cost in recompute_cost(saving_model).values())


def compiled(rank: int, fullgraph: bool) -> list[tuple[float, dict[str, int], bool]]:
    """One layer compiled, without recompute and in each way: (largest difference, collectives of its backward,
    compiled).

    fullgraph: refuse a graph that breaks.
    """
    from torch._dynamo.backends.common import aot_autograd

    results = []
    for how in (None, *CONFIGURATIONS):
        net, sent, graphs = tiny_model("gemma2", torch.float64), Counter(), []
        parallelize_module(net, build_mesh("cpu", tp=2))
        if how is not None:
            recompute(net, **how)
        expected = run(copy.deepcopy(net), 1)

        def count(graph, inputs, sent=sent):
            names = [str(node.target) for node in graph.graph.nodes]
            sent.update(name.split(".")[1] for name in names if "c10d" in name and "wait" not in name)
            return graph.forward

        def note(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        parallelize_module(tiny_model("gpt2"), build_mesh("cpu", tp=2))  # serves compilers again, after a reset
        net.model.layers[1].compile(fullgraph=fullgraph, backend=aot_autograd(fw_compiler=note, bw_compiler=count))
        actual = run(net, 1)
        assert not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint
        largest = max(
            float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in zip(actual, expected, strict=True)
        )
        results.append((largest, dict(sent), bool(graphs)))
    torch._dynamo.reset()
    return results
