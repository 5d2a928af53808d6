"""What a stock forward computes in float32 is computed in float64 while it is compared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize import recompute
from parallelize.tools.verification.precision import computing_in, widen_recompute

LEAST = torch.finfo(torch.float64).min
MADE = {
    "zeros": lambda: torch.zeros(2),
    "ones of a device": lambda: torch.ones(2, device="cpu"),
    "linspace": lambda: torch.linspace(0, 1, 3),
    "a number that float32 does not have": lambda: torch.full((), LEAST),
    "a list of numbers": lambda: torch.tensor([[1, 0.5]]),
    "arange of a step": lambda: torch.arange(0, 1, 0.25),
    "a dtype that is named": lambda: torch.zeros(2, dtype=torch.float32),
}
OTHERS = {
    "whole numbers": (lambda: torch.arange(3), torch.int64),
    "full of whole numbers": (lambda: torch.full((2,), 7), torch.int64),
    "a list of truths": (lambda: torch.tensor([True]), torch.bool),
    "another dtype": (lambda: torch.zeros(2, dtype=torch.bfloat16), torch.bfloat16),
    "a dtype by position": (lambda: torch.ones(2).to(torch.int32), torch.int32),
    "like another": (lambda: torch.zeros_like(torch.zeros(2, dtype=torch.int8)), torch.int8),
}


@pytest.mark.parametrize("what", MADE)
def test_tensors_that_a_forward_makes(what):
    with computing_in(torch.float64):
        assert MADE[what]().dtype == torch.float64


@pytest.mark.parametrize("what", OTHERS)
def test_tensors_of_other_dtypes(what):
    make, dtype = OTHERS[what]
    with computing_in(torch.float64):
        assert make().dtype == dtype


def test_another_default_stays():
    torch.set_default_dtype(torch.bfloat16)
    try:
        with computing_in(torch.float64):
            assert torch.zeros(2).dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_matmul_with_a_tensor_that_the_forward_makes():
    with computing_in(torch.float64):
        assert (torch.ones(2, 2) @ torch.randn(2, 2).double()).dtype == torch.float64
    with computing_in(torch.float32):
        assert torch.zeros(2).dtype == torch.float32


class Rounds(nn.Module):
    """Computes in float32 in its own forward, outside of the modules in it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.3, 0.7]))

    def forward(self, x):
        return (x * self.scale).float().tanh().exp().type_as(x)


def test_a_replay_of_a_recomputed_unit():
    model = nn.Sequential(Rounds().double())
    x = torch.tensor([[0.1, 0.9]], dtype=torch.float64)
    exact = torch.autograd.grad((x * model[0].scale).tanh().exp().sum(), model[0].scale)[0]
    recompute(model, "full", units=["0"])
    widen_recompute(model)
    with computing_in(torch.float64):
        out = model(x).sum()
    out.backward()
    assert (model[0].scale.grad - exact).abs().max() < 1e-15
