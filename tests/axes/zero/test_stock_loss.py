"""The loss that a stock model computes from labels has the gradients of the unsharded model, over every data axis."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

from parallelize import ModelError, build_mesh, parallelize_model
from parallelize.state.full_values import full_gradients
from tests.plan.models.test_label_loss import Doubled
from tests.support.models import COMMON, GQA, tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.refused import refused, small_mesh
from tests.support.threads import run_ranks

LENGTH = 8


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.sweep)])
def test_labels_that_are_passed_by_position(family):
    """The matrix passes them by name."""
    initial = tiny_model(family, torch.float64)
    ids, labels = tiny_batch(batch=4, length=LENGTH)
    labels[0, :5] = -100  # unequal counts
    reference = copy.deepcopy(initial)
    reference(input_ids=ids, labels=labels).loss.backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    models = [copy.deepcopy(initial) for _ in range(2)]
    between = list(inspect.signature(type(initial).forward).parameters).index("labels") - 2

    def body(rank: int):
        model = parallelize_model(models[rank], build_mesh("cpu", dp=2)).module
        rows = slice(2 * rank, 2 * rank + 2)
        model(ids[rows], *[None] * between, labels[rows]).loss.backward()
        return full_gradients(model)

    for gradients in run_ranks(2, body):
        assert worst(gradients, expected)[0] < 1e-12


def test_a_loss_without_a_graph_is_that_of_the_rank():
    """So that one rank may evaluate alone."""
    initial = tiny_model("llama", torch.float64)
    ids, labels = tiny_batch(batch=2, length=LENGTH)
    expected = initial(input_ids=ids, labels=labels).loss
    models = [copy.deepcopy(initial) for _ in range(2)]

    def body(rank: int):
        model = parallelize_model(models[rank], build_mesh("cpu", dp=2)).module
        if rank == 0:
            with torch.no_grad():
                assert torch.equal(model(input_ids=ids, labels=labels).loss, expected)

    run_ranks(2, body)


def means() -> dict[str, tuple[nn.Module, dict, torch.Tensor]]:
    """Models whose loss is a mean that takes no count: with their inputs, and labels that are unequally many on two
    ranks."""
    import transformers

    config = transformers.LlamaConfig(**COMMON, **GQA, num_labels=3, classifier_dropout=0.0)
    ids, labels = tiny_batch(batch=4, length=LENGTH)
    labels[0, :5] = -100
    classes = torch.tensor([0, -100, 2, 1])
    of_samples, of_tokens = transformers.LlamaForSequenceClassification, transformers.LlamaForTokenClassification
    return {
        "masked": (tiny_model("bert", torch.float64), {"input_ids": ids}, labels),
        "samples": (of_samples(config).double(), {"input_ids": ids.clamp(min=3)}, classes),
        "tokens": (of_tokens(config).double(), {"input_ids": ids}, labels.clamp(max=2)),
        "none on a rank": (
            tiny_model("bert", torch.float64),
            {"input_ids": ids},
            labels.index_fill(0, torch.arange(2), -100),
        ),
    }


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("name", ["masked", "samples", "tokens", "none on a rank"])
@pytest.mark.parametrize("zero", [0, 2])
def test_a_mean_over_labels_is_that_over_all_data_ranks(name, zero):
    torch.manual_seed(0)
    initial, inputs, labels = means()[name]
    reference = copy.deepcopy(initial)
    total = reference(**inputs, labels=labels).loss
    total.backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    models = [copy.deepcopy(initial) for _ in range(2)]

    def body(rank: int):
        model = parallelize_model(models[rank], build_mesh("cpu", dp=2), zero=zero).module
        rows = slice(2 * rank, 2 * rank + 2)
        call = {name: value[rows] for name, value in inputs.items()}
        part = model(**call, labels=labels[rows]).loss
        part.backward()
        return part.detach(), full_gradients(model)

    (first, gradients), (second, _) = run_ranks(2, body)
    torch.testing.assert_close(first + second, total.detach(), check_dtype=False, rtol=1e-6, atol=0)
    assert worst(gradients, expected)[0] < 1e-6  # the stock loss is in float32


def test_a_mean_in_a_tuple_is_weighed_too():
    initial, inputs, labels = means()["masked"]
    total = initial(**inputs, labels=labels).loss.detach()
    models = [copy.deepcopy(initial) for _ in range(2)]

    def body(rank: int):
        model = parallelize_model(models[rank], build_mesh("cpu", dp=2)).module
        rows = slice(2 * rank, 2 * rank + 2)
        return model(inputs["input_ids"][rows], labels=labels[rows], return_dict=False)[0].detach()

    torch.testing.assert_close(sum(run_ranks(2, body)), total, check_dtype=False, rtol=1e-6, atol=0)


def test_a_loss_that_is_no_part_of_a_mean():
    from transformers import LlamaConfig, LlamaForQuestionAnswering

    ids, _ = tiny_batch(batch=2, length=LENGTH)
    places = torch.tensor([0, 1])
    with small_mesh(dp=2) as mesh:
        model = parallelize_model(LlamaForQuestionAnswering(LlamaConfig(**COMMON, **GQA)), mesh).module
        with refused(ModelError, "labels-over-data-ranks", "LlamaForQuestionAnswering", "start_positions", "step"):
            model(input_ids=ids, start_positions=places, end_positions=places)
        model(input_ids=ids).start_logits.sum().backward()
        doubled = parallelize_model(Doubled(tiny_model("llama").config), mesh).module
        with refused(ModelError, "labels-over-data-ranks", "Doubled", "no cross entropy", "step"):
            doubled(input_ids=ids, labels=ids)
