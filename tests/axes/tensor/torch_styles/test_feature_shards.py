"""Styles whose `Shard(1)` or `Shard(-1)` is a shard of the features: a row linear with a bias, and a norm, of [tokens,
features]."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from parallelize import build_mesh, full_gradients, parallelize_module
from tests.support.parity import worst
from tests.support.threads import run_ranks

NORMS = {"layer norm": nn.LayerNorm, "rms norm": nn.RMSNorm}
BY_FIRST_DIM_TOO = {"lowered": Shard(1), "as it is": Shard(-1)}  # of which one is a rule of a plan


def stock_model(width: int, norm: str) -> Any:
    torch.manual_seed(0)
    last = NORMS[norm](width) if norm else nn.Identity()
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, width), last).double()
    with torch.no_grad():
        for parameter in model[2].parameters():
            parameter.add_(torch.rand_like(parameter))
    return model


def check(
    styles: dict[str, Any], width: int, norm: str, shape: tuple[int, ...], placement: Any, ranks: int = 2
) -> None:
    """The output, the input's gradient and every parameter's gradient of two backward passes equal the unsharded
    model's."""
    stock = stock_model(width, norm)
    copies = [copy.deepcopy(stock) for _ in range(ranks)]
    values = torch.randn(*shape, 6).double()
    x = values.clone().requires_grad_()
    expected = stock(x)
    grad = torch.randn_like(expected)
    for _ in range(2):
        stock(x).backward(grad)
    gradients = {"input": x.grad, **{name: p.grad for name, p in stock.named_parameters()}}

    def body(rank: int) -> dict[str, torch.Tensor]:
        planned = parallelize_module(copies[rank], build_mesh("cpu", tp=ranks), styles)
        local = values.clone().requires_grad_()
        for _ in range(2):
            out = planned(local)
            assert isinstance(out, DTensor) and out.placements == (placement,) and out.shape == expected.shape
            full = out.full_tensor()
            assert (full - expected).abs().max() < 1e-12
            full.backward(grad)
        return {"input": local.grad, **full_gradients(planned)}

    for actual in run_ranks(ranks, body):
        assert worst(actual, gradients)[0] < 1e-12, worst(actual, gradients)


@pytest.mark.parametrize("layout", BY_FIRST_DIM_TOO)
@pytest.mark.parametrize("width", [10, 9, 1])
def test_the_bias_of_a_row_linear_whose_output_is_sharded_along_features(width, layout):
    row = RowwiseParallel(output_layouts=BY_FIRST_DIM_TOO[layout], use_local_output=False)
    check({"0": ColwiseParallel(), "1": row}, width, "", (5,), Shard(1))


@pytest.mark.parametrize("plain", [True, False], ids=["plain tensors", "DTensors"])
@pytest.mark.parametrize("layout", BY_FIRST_DIM_TOO)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_whose_sequence_dim_is_the_dim_of_the_features(norm, layout, plain):
    """PyTorch's norm gathers them, and its output is replicated."""
    row = RowwiseParallel(output_layouts=BY_FIRST_DIM_TOO[layout], use_local_output=plain)
    styles = {"0": ColwiseParallel(), "1": row, "2": SequenceParallel(sequence_dim=1)}
    check(styles, 12, norm, (5,), Replicate(), ranks=3)


@pytest.mark.parametrize("norm", NORMS)
def test_the_same_styles_shard_the_sequence_of_three_dims(norm):
    styles = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(1)), "2": SequenceParallel()}
    check(styles, 10, norm, (3, 4), Shard(1))
