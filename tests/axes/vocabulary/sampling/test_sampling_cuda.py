"""The same tokens on CUDA as on the CPU, for every filter; and `transformers`' generation draws from CUDA's
generator."""

from __future__ import annotations

import pytest
import torch

from parallelize import sample
from parallelize.axes.vocabulary.generation.transformers_generate import _set_states, _states
from parallelize.axes.vocabulary.sampling.candidates import masses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 100, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    ],
    ids=str,
)
def test_tokens_are_those_of_the_cpu(options, dtype):
    z = (torch.randn(16, 50_021, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    assert torch.equal(sample(z.cuda(), **options).cpu(), sample(z, **options))


def test_masses_have_the_bits_of_the_cpu():
    x = -torch.rand(1 << 20, dtype=torch.float64) * 40
    assert torch.equal(masses(x.cuda(), 44).cpu(), masses(x, 44))


def test_states_of_both_generators_are_taken_and_put_back():
    device = torch.device("cuda")
    states = _states(device)
    first = torch.rand(3), torch.rand(3, device=device)
    _set_states(states, device)
    again = torch.rand(3), torch.rand(3, device=device)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
