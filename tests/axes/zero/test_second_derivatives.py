"""A gradient penalty by a model's inputs is that of one process under ZeRO 0 to 2, and refused by name under ZeRO 3."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import ModelError, build_mesh, full_gradients, shard_data
from tests.support.threads import run_ranks


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().sum()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_gradient_penalty(zero):
    torch.manual_seed(0)
    initial = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    rows = torch.randn(2, 4, 3, dtype=torch.float64)

    def body(rank: int) -> None:
        model, reference = copy.deepcopy(initial), copy.deepcopy(initial)
        shard_data(model, build_mesh("cpu", dp=2), zero)
        own = rows[rank].clone().requires_grad_()
        reference_rows = rows.flatten(0, 1).clone().requires_grad_()
        expected: Any = penalty(reference, reference_rows)
        expected.backward()
        value = penalty(model, own)  # its value alone is right
        torch.testing.assert_close(value, penalty(reference, own), rtol=1e-12, atol=0)
        if zero < 3:
            value.backward()
            for name, gradient in full_gradients(model).items():
                torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
            return
        with pytest.raises(ModelError, match="double-backward"):
            value.backward()
        reference.zero_grad()
        reference(rows.flatten(0, 1)).sum().backward()
        model(rows[rank]).sum().backward()  # the next step is right
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-10, atol=1e-12)

    run_ranks(2, body)
