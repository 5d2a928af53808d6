"""What a stage shows of the modules on other stages: shape and dtype of parameters in forwards, and where they are in
`print`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from parallelize import build_mesh, full_gradients, parallelize_model
from tests.support.models import shipped_source, tiny_model
from tests.support.parity import worst
from tests.support.threads import run_ranks


def loss(out, targets):
    return F.cross_entropy(out.logits, targets, reduction="sum")


@pytest.mark.parametrize("family", ["vit", pytest.param("dinov2", marks=pytest.mark.sweep)])
def test_the_loss_and_gradients_of_stages_are_those_of_one_process(family):
    model = shipped_source(family).build("cpu", dtype=torch.float64)
    images, targets = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    reference = copy.deepcopy(model)
    expected_loss = loss(reference(pixel_values=images), targets) / len(targets)
    expected_loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}

    def body(rank):
        mesh = build_mesh("cpu", pp=2, tp=2)
        parallel = parallelize_model(copy.deepcopy(model), mesh, loss=loss, count=len)
        value = parallel.step(pixel_values=images, targets=targets)
        assert abs(value - expected_loss) < 1e-12
        return {name: grad for name, grad in full_gradients(parallel.module).items() if grad is not None}

    gradients = run_ranks(4, body)
    assert {name for own in gradients for name in own} == expected.keys()
    for own in gradients:
        assert worst(own, {name: expected[name] for name in own})[0] < 1e-12


def test_a_stage_is_printed():
    """Norms of `transformers` print the shape of their weight, which is None where another stage has it."""
    model = tiny_model("llama")

    def body(rank):
        parallel = parallelize_model(copy.deepcopy(model), build_mesh("cpu", pp=2))
        copy.deepcopy(parallel.module)
        return repr(parallel.module)

    first, last = run_ranks(2, body)
    assert "LlamaRMSNorm(on another stage)" in first and "(lm_head): Linear(on another stage)" in first
    assert "(embed_tokens): Embedding(on another stage)" in last and "(lm_head): Linear(in_features" in last
