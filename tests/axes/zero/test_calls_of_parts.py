"""Modules in no ZeRO 3 unit are called by hand, beside forwards of their model: values and gradients are those of one
process."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import build_mesh, full_gradients, parallelize_model
from tests.support.models import tiny_model
from tests.support.threads import run_ranks

IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 3, 5, 2, 1], [9, 1, 4, 4, 7]])
HIDDEN = torch.randn(4, 5, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MESHES = [{"dp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"dp": 2, "tp": 2}]


def embedding_then_model(model, ids):
    """The embedding's gradient comes after backward has passed the model's input."""
    embeds = model.get_input_embeddings()(ids)
    return model(inputs_embeds=embeds * (1 + embeds.detach().tanh())).logits.square().sum()


def base_and_head(model, ids):
    hidden = model.model(input_ids=ids).last_hidden_state
    return sum(model.lm_head(part).square().sum() for part in hidden.chunk(2, dim=1))


def head_alone(model, ids):
    return model.lm_head(model.model.norm(HIDDEN[: len(ids)])).square().sum()


def between_forwards(model, ids):
    first = model(input_ids=ids).logits.square().sum()
    extra = model.model.embed_tokens(ids.flip(-1)).square().sum()
    return first + extra + model(input_ids=ids.flip(-1)).logits.square().sum()


def untied_halves(model, ids):
    """Two backwards, of which the first reduces what the second adds to."""
    embeds = model.model.embed_tokens(ids)
    embeds.square().sum().backward()
    return model(input_ids=ids).logits.square().sum()


CALLS = [embedding_then_model, base_and_head, head_alone, between_forwards, untied_halves]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_one_process(axes, call, tied):
    reference = tiny_model("llama", torch.float64, tie_word_embeddings=tied)
    models = [copy.deepcopy(reference) for _ in range(4)]
    ranks = 2 if axes == {"dp": 2} else 4
    samples = 4 if "dp_replicate" in axes else 2

    def expected(ids):
        """Of the model's own sum over the rows of each data rank."""
        for rows in ids.chunk(samples):
            call(reference, rows).backward()

    if call is head_alone:
        for _ in range(samples):
            call(reference, IDS[: 4 // samples]).backward()
    else:
        expected(IDS)
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}

    def body(rank):
        mesh = build_mesh("cpu", **axes)
        model = parallelize_model(models[rank], mesh, zero=3).module
        index = rank // (ranks // samples)
        for _ in range(2):  # the second time parameters were gathered and freed before
            model.zero_grad()
            call(model, IDS.chunk(samples)[index]).backward()
        return full_gradients(model)

    for own in run_ranks(ranks, body):
        assert gradients.keys() <= own.keys()
        for name, gradient in gradients.items():
            assert (own[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_what_was_gathered_without_gradients_is_not_used_after_a_step(axes):
    models = [tiny_model("llama", torch.float64) for _ in range(4)]

    def body(rank):
        model = parallelize_model(models[rank], build_mesh("cpu", **axes), zero=3).module
        parameters = list(model.parameters())  # as an optimizer has them
        model(input_ids=IDS).logits.square().sum().backward()
        with torch.no_grad():
            before = model.model.embed_tokens(IDS)
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(2)
            after = model.model.embed_tokens(IDS)
            hidden = model.model(input_ids=IDS).last_hidden_state
            return before, after, model.lm_head(hidden), model(input_ids=IDS).logits

    for before, after, by_hand, logits in run_ranks(2 if axes == {"dp": 2} else 4, body):
        assert torch.equal(after, 2 * before) and torch.equal(by_hand, logits)


def test_generation_by_hand_is_that_of_one_process():
    models = [tiny_model("llama", torch.float64).eval() for _ in range(3)]
    expected = models[2].generate(input_ids=IDS, max_new_tokens=3, do_sample=False)

    def body(rank):
        model = parallelize_model(models[rank], build_mesh("cpu", dp=2), zero=3).module
        ids = IDS
        with torch.no_grad():
            for _ in range(3):
                hidden = model.model(input_ids=ids).last_hidden_state
                ids = torch.cat([ids, model.lm_head(hidden[:, -1:]).argmax(-1)], dim=1)
        return ids

    assert all(torch.equal(ids, expected) for ids in run_ranks(2, body))
