"""A model that nobody uses any more is freed, with its plan, reducer and optimizer: a process may build and explain
many."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from parallelize import explain, parallelize_model, parallelize_module
from parallelize.base.errors import ModelError
from tests.support.models import tiny_model
from tests.support.refused import refused, small_mesh

IDS = torch.arange(16).reshape(2, 8)


def freed(*references: weakref.ref) -> bool:
    gc.collect()
    return all(reference() is None for reference in references)


@pytest.mark.parametrize(
    ("zero", "tie"),
    [
        (0, False),
        pytest.param(1, True, marks=pytest.mark.sweep),
        (2, True),
        pytest.param(3, False, marks=pytest.mark.sweep),
    ],
)
def test_after_a_step_over_data_ranks(zero, tie):
    with small_mesh(dp=2, tp=2) as mesh:
        model = parallelize_model(tiny_model("llama", tie_word_embeddings=tie), mesh, "llama", zero=zero)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        model.step(input_ids=IDS, targets=IDS.roll(-1, 1))
        optimizer.step()
        references = weakref.ref(model.module), weakref.ref(next(model.module.parameters()))
        del model, optimizer
        assert freed(*references)


def test_without_tensor_parallelism():
    """Plain parameters, whose hooks are on autograd's nodes."""
    with small_mesh(dp=2) as mesh:
        model = parallelize_model(tiny_model("llama"), mesh, "llama", zero=1)
        model.step(input_ids=IDS, targets=IDS.roll(-1, 1))
        references = weakref.ref(model.module), weakref.ref(next(model.module.parameters()))
        del model
        assert freed(*references)


def test_after_a_backward_with_hooks_of_the_user():
    """A hook on a parameter makes its gradient arrive in the middle of backward."""
    with small_mesh(tp=2) as mesh:
        model = parallelize_module(tiny_model("llama"), mesh, "llama")
        calls: list[torch.Tensor] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(calls.append)
        model(input_ids=IDS).logits.sum().backward()
        assert calls
        references = weakref.ref(model), weakref.ref(model.model.layers[0].mlp.up_proj.weight)
        del model, parameter
        calls.clear()
        assert freed(*references)


@pytest.mark.sweep
def test_after_an_explanation():
    references = []

    def build() -> torch.nn.Module:
        model = tiny_model("llama")
        references.append(weakref.ref(model))
        return model

    explain(build, "llama", mesh="tp=2")
    assert references and freed(*references)


def test_a_parameter_that_outlives_its_model_is_refused():
    with small_mesh(dp=2) as mesh:
        model = parallelize_model(tiny_model("llama"), mesh, "llama", zero=0)
        weight = model.module.lm_head.weight
        del model
        gc.collect()
        with refused(ModelError, "unreduced-gradients", "was deleted"):
            weight.sum().backward()
