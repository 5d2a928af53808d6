"""`verify` and export of models with quantized linears."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import build_mesh, export_weights, parallelize_module, verify
from tests.state.quantization.quantized_models import quantized
from tests.support.threads import run_ranks


def test_codes_are_exported_under_the_model_s_names():
    model = quantized("llama")

    def body(rank):
        planned = parallelize_module(copy.deepcopy(model), build_mesh("cpu", tp=2))
        values = {}
        for bucket in export_weights(planned, names="model"):
            values |= {name: value.clone() for name, value in bucket.tensors.items()}
        return values

    state = model.state_dict()
    for values in run_ranks(2, body):
        assert values.keys() == state.keys() and all(torch.equal(values[n], value) for n, value in state.items())


@pytest.mark.sweep
def test_verify():
    result = verify(lambda: quantized("llama", dtype=torch.float32), None, "dp=2,tp=2", zero=3)
    assert result.ok, str(result)
