"""The magnitudes of a small model's weights: no term is negligible, and an initialization that scales attention is
kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize.tools.verification.perturbation import perturb
from parallelize.tools.verification.precision import computing_in


@pytest.mark.parametrize(("scale", "expected"), [(1.0, 1.0), (0.2, 0.2), (1e-6, 0.05)])
def test_a_matrix_that_begins_smaller_than_its_siblings_stays_so(scale, expected):
    torch.manual_seed(0)
    block = nn.ModuleDict({name: nn.Linear(64, 64) for name in "qkv"})
    with torch.no_grad():
        block["q"].weight.mul_(scale)
    perturb(nn.ModuleDict({"attention": block}), seed=0)
    ratio = float(block["q"].weight.std() / block["k"].weight.std())
    assert ratio == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("initial", [0.01, 10.0])
def test_a_gain_below_one_makes_all_matrices_smaller(initial):
    torch.manual_seed(0)
    linear = nn.Linear(64, 64)
    with torch.no_grad():
        linear.weight.mul_(initial / linear.weight.std())
    perturb(linear, seed=0, gain=0.25)
    assert float(linear.weight.std()) == pytest.approx(0.25 * 1.2 / 8, rel=0.01)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_a_gate_that_begins_as_zero_is_opened(shape):
    """What it scales would have no gradient."""
    gate = nn.ParameterDict({"gate": torch.zeros(shape)})
    perturb(gate, seed=0)
    assert gate["gate"].abs().item() > 1e-3


def test_the_smallest_number_of_a_mask_in_float64():
    """`torch.full` would make float32 of it, which does not hold it: XGLM and Kosmos 2 make their masks so."""
    smallest = torch.finfo(torch.float64).min
    with computing_in(torch.float64):
        masks = [torch.full((2, 2), smallest), torch.full((2, 2), fill_value=smallest), torch.full((2, 2), 1)]
        named = torch.full((2,), 0.5, dtype=torch.bfloat16)
    assert [mask.dtype for mask in masks] == [torch.float64, torch.float64, torch.int64]
    assert named.dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="overflow"):
        torch.full((2, 2), smallest)
