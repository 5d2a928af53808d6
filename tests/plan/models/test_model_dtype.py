"""A model in another dtype keeps the imaginary parts of its complex buffers, which `Module.to` drops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize.plan.models.model_source import source_of
from parallelize.plan.models.tiny_copy import in_dtype


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("factors", torch.polar(torch.ones(3), torch.tensor([0.1, 0.5, 2.0])))
        self.register_buffer("absent", None)

    def forward(self, x):
        return self.linear((x * self.factors).abs())


@pytest.mark.parametrize(
    ("dtype", "of_buffer"), [(torch.float64, torch.complex128), (torch.bfloat16, torch.complex64)], ids=str
)
def test_complex_buffers_stay_complex(dtype, of_buffer):
    model = in_dtype(Rotary(), dtype)
    assert model.linear.weight.dtype is dtype and model.factors.dtype is of_buffer
    torch.testing.assert_close(model.factors.to(torch.complex64), Rotary().factors)
    assert model.absent is None and list(model.state_dict()) == ["factors", "linear.weight", "linear.bias"]


def test_a_built_model_has_them():
    assert source_of(Rotary()).build("cpu", dtype=torch.float64).factors.imag.abs().sum() > 0.5
