"""Dicts over models whose forwards call functions outside of their classes: every form is exact, and most get plain
tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as stock

from parallelize import build_mesh, parallelize_module
from parallelize.axes.tensor.dtensor_handover import WatchedDTensor
from tests.support.parity import worst
from tests.support.threads import run_ranks

DIM, INNER = 12, 20
T = torch.Tensor


def through_a_function(block: Any, x: T) -> T:
    return _activated(block, x)


def of_twice_the_input_later(block: Any, x: T) -> T:
    """The first forward passes its input to linears alone."""
    block.calls = getattr(block, "calls", 0) + 1
    return _activated(block, x * 2 if block.calls > 2 else x)


def on_a_part(block: Any, x: T) -> T:
    return _activated(block, x[:, : x.shape[1]])


def in_other_shapes(block: Any, x: T) -> T:
    return _activated(block, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def of_a_dtensor(block: Any, x: T) -> T:
    return _activated(block, x.to_local() if isinstance(x, DTensor) else x)


def _activated(block: Any, x: T) -> T:
    return F.silu(block.gate(x)) * block.up(x)


class Block(nn.Module):
    def __init__(self, code: Callable[[Any, T], T]):
        super().__init__()
        self.code, self.seen = code, None
        self.gate, self.up, self.down = nn.Linear(DIM, INNER), nn.Linear(DIM, INNER), nn.Linear(INNER, DIM)

    def forward(self, x: T) -> T:
        self.seen = type(x)
        return self.down(self.code(self, x))


def _run(layer: Any, x: T) -> T:
    return x + layer.block(layer.norm(x))


class Layer(nn.Module):
    def __init__(self, code: Callable[[Any, T], T]):
        super().__init__()
        self.norm, self.block = nn.RMSNorm(DIM), Block(code)

    def forward(self, x: T) -> T:
        return _run(self, x)


class Model(nn.Module):
    def __init__(self, code: Callable[[Any, T], T]):
        super().__init__()
        self.table = nn.Embedding(17, DIM)
        self.layers = nn.ModuleList(Layer(code) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, 17)

    def forward(self, ids: T) -> T:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def styles(is_local: bool) -> dict[str, Any]:
    gather = stock.PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=is_local
    )
    return {
        "table": stock.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.norm": stock.SequenceParallel(),
        "layers.*.block": gather,
        "layers.*.block.gate": stock.ColwiseParallel(),
        "layers.*.block.up": stock.ColwiseParallel(),
        "layers.*.block.down": stock.RowwiseParallel(output_layouts=Shard(1)),
        "norm": stock.SequenceParallel(),
        "head": stock.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


PASSES_ON = (through_a_function, of_twice_the_input_later)
IDS = torch.arange(24).view(2, 12) * 5 % 17


def gradients(model: nn.Module) -> dict[str, T]:
    full = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return full


def trained(model: nn.Module) -> dict[str, T]:
    F.cross_entropy(model(IDS).flatten(0, 1), IDS.roll(1, 1).flatten()).backward()
    return gradients(model)


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("code", [*PASSES_ON, on_a_part, in_other_shapes, of_a_dtensor], ids=lambda code: code.__name__)
def test_each_form_of_code_is_exact(code, is_local):
    base = Model(code).double()
    models, reference = [copy.deepcopy(base) for _ in range(2)], base

    def body(rank):
        model = parallelize_module(models[rank], build_mesh("cpu", tp=2), styles(is_local))
        with torch.no_grad():
            logits = [model(IDS) for _ in range(3)]
        for layer in model.layers:
            layer.block.calls = 0
        seen = []
        steps = []
        for _ in range(4):
            steps.append(trained(model))
            seen.append(model.layers[0].block.seen)
        return logits, steps, seen

    results = run_ranks(2, body)
    with torch.no_grad():
        expected_logits = [reference(IDS) for _ in range(3)]
    for layer in reference.layers:
        layer.block.calls = 0
    expected = [trained(reference) for _ in range(4)]
    for logits, steps, seen in results:
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(logits, expected_logits, strict=True))
        assert max(worst(*pair)[0] for pair in zip(steps, expected, strict=True)) < 1e-12
        if is_local:
            assert set(seen) == {T}
        elif code in PASSES_ON:
            assert seen == [WatchedDTensor, T, T, T]
        else:
            assert seen == [WatchedDTensor, DTensor, DTensor, DTensor]


def test_a_linear_that_takes_another_placement_gets_the_dtensor():
    """The norm returns a shard, and the linear takes plain inputs for full ones: only the DTensor says which it is."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up = nn.RMSNorm(DIM), nn.Linear(DIM, INNER)

        def forward(self, x: T) -> T:
            return _both(self, x)

    def _both(net: Any, x: T) -> T:
        return net.up(net.norm(x))

    base = Net().double()
    models, x = [copy.deepcopy(base) for _ in range(2)], torch.randn(2, 6, DIM, dtype=torch.float64)
    base(x).square().sum().backward()
    expected = gradients(base)

    def body(rank):
        plan = {
            "norm": stock.SequenceParallel(),
            "up": stock.ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        }
        model = parallelize_module(models[rank], build_mesh("cpu", tp=2), plan)
        steps = []
        for _ in range(3):
            model(x.chunk(2, 1)[rank]).square().sum().backward()
            steps.append(gradients(model))
        return steps

    for actual in run_ranks(2, body):
        assert max(worst(step, expected)[0] for step in actual) < 1e-12
