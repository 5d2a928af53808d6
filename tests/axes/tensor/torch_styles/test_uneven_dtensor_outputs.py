"""Styles that return DTensors shard sequences of any length."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parallelize import build_mesh, full_gradients, parallelize_module
from tests.support.parity import worst
from tests.support.threads import run_ranks

RETURNED = {"output_layouts": Shard(1), "use_local_output": False}
STYLES = {
    "row": {"0": ColwiseParallel(), "1": RowwiseParallel(**RETURNED)},
    "column": {"1": ColwiseParallel(**RETURNED)},
}


@pytest.mark.parametrize("length", [1, 8, 9])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_outputs_and_gradients(style, bias, length):
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8, bias=bias)).double()
    x, grad = torch.randn(2, length, 8).double(), torch.randn(2, length, 8).double()
    expected = stock(x)
    models = [copy.deepcopy(stock) for _ in range(2)]
    expected.backward(grad)
    gradients = {name: p.grad for name, p in stock.named_parameters()}

    def body(rank):
        planned = parallelize_module(models[rank], build_mesh("cpu", tp=2), STYLES[style])
        for model in (copy.deepcopy(planned), planned):
            out = model(x)
            assert isinstance(out, DTensor) and out.placements == (Shard(1),) and out.shape == expected.shape
            assert out.to_local().shape[1] == len(torch.arange(length).tensor_split(2)[rank])
            assert (out.full_tensor() - expected).abs().max() < 1e-12
        out.full_tensor().backward(grad)
        return full_gradients(planned)

    for actual in run_ranks(2, body):
        assert worst(actual, gradients)[0] < 1e-12
