"""The loss that a stock model computes from labels has the gradients of the unsharded model, over every data axis."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import ModelError, build_mesh, parallelize_model
from parallelize.applied.sharding import full_gradients
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst
from tests.support.refused import refused, small_mesh
from tests.support.threads import run_ranks

LENGTH = 8


def data_index(mesh, axes) -> int:
    return mesh.get_local_rank("dp") if "dp" in axes else 0


@pytest.mark.variants(every=8)
@pytest.mark.parametrize("passed", ["keyword", "position", "count"])
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"cp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_labels_mean_the_same_on_every_axis(axes, zero, passed):
    if zero and "dp" not in axes:
        pytest.skip("nothing to shard over")
    if passed == "position" and "cp" in axes:
        pytest.skip("one form of each is enough")
    initial = tiny_model("llama", torch.float64)
    ids, labels = tiny_batch(batch=4, length=LENGTH)
    labels[0, :5] = -100  # unequal counts
    reference = copy.deepcopy(initial)
    total = reference(input_ids=ids, labels=labels).loss
    total.backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    size = 2 ** len(axes)
    models = [copy.deepcopy(initial) for _ in range(size)]
    count = (labels[:, 1:] != -100).sum()

    def body(rank: int):
        mesh = build_mesh("cpu", **axes)
        model = parallelize_model(models[rank], mesh, zero=zero).module
        index = data_index(mesh, axes)
        rows = slice(2 * index, 2 * index + 2) if "dp" in axes else slice(None)
        if passed == "position":
            out = model(ids[rows], None, None, None, None, labels[rows])
        else:
            extra = {"num_items_in_batch": count} if passed == "count" else {}
            out = model(input_ids=ids[rows], labels=labels[rows], **extra)
        out.loss.backward()
        return full_gradients(model)

    for gradients in run_ranks(size, body):
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


def test_a_loss_whose_count_is_not_known():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=67, num_labels=3, pad_token_id=0)
    ids, _ = tiny_batch(batch=2, length=LENGTH)
    with small_mesh(dp=2) as mesh:
        model = parallelize_model(LlamaForSequenceClassification(config), mesh).module
        with refused(ModelError, "labels-over-data-ranks", "LlamaForSequenceClassification", "count", "step"):
            model(input_ids=ids, labels=torch.tensor([0, 1]))
        model(input_ids=ids).logits.sum().backward()
