"""Caches and generation that cannot be right over `cp` are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelize import ModelError, ShapeError
from tests.axes.context.test_generation_over_cp import on_ranks
from tests.axes.vocabulary.generation.generation_jobs import lively_model
from tests.axes.vocabulary.small_head import slug_of

transformers = pytest.importorskip("transformers")
IDS = torch.arange(3, 15).view(2, 6)


def filled(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS, use_cache=True).past_key_values


def test_caches_that_are_refused():
    model = lively_model("llama")
    stock_cache = filled(model)
    offloaded = {"offloading": True} if torch.cuda.is_available() else {}

    def body(net):
        slugs = [slug_of(ModelError, lambda: net(IDS, use_cache=True))]  # it records a graph
        with torch.no_grad():
            slugs.append(slug_of(ModelError, lambda: net(IDS, past_key_values=stock_cache)))
            slugs.append(slug_of(ModelError, lambda: net(IDS, labels=IDS, use_cache=True)))
            cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
            slugs.append(slug_of(ModelError, lambda: net(IDS, past_key_values=cache)))
            if offloaded:
                cache = transformers.DynamicCache(config=net.config, **offloaded)
                slugs.append(slug_of(ModelError, lambda: net(IDS, past_key_values=cache)))
        return slugs

    for slugs in on_ranks(model, {"cp": 2}, body):
        assert set(slugs) == {"cache-over-cp"}


def test_calls_that_are_refused():
    model = lively_model("llama")

    @torch.no_grad()
    def body(net):
        cache = net(IDS, use_cache=True, logits_to_keep=1).past_key_values
        short = transformers.StaticCache(config=net.config, max_cache_len=7)
        net(IDS, past_key_values=short)
        how = {"max_new_tokens": 2, "pad_token_id": 0, "do_sample": False, "return_dict_in_generate": True}
        last = torch.tensor([5])
        return [
            slug_of(ShapeError, lambda: net(IDS[:, :2], past_key_values=short)),
            slug_of(ShapeError, lambda: net(IDS[:, :1], past_key_values=cache, attention_mask=IDS[:, :1] > 0)),
            slug_of(ModelError, lambda: net.generate(IDS, output_hidden_states=True, **how)),
            slug_of(ModelError, lambda: net(IDS, use_cache=True, logits_to_keep=last)),
            slug_of(ModelError, lambda: net(IDS, use_cache=True, logits_to_keep=1, return_dict=False)),
            slug_of(ModelError, lambda: cache.update(torch.zeros(2, 4, 1, 12), torch.zeros(2, 4, 1, 12), 0)),
        ]

    expected = ["cache-full", "bad-mask", "hidden-states-over-cp", "one-row", "one-row", "outside-context"]
    assert on_ranks(model, {"cp": 2}, body) == [expected] * 2


def test_cropping_beyond_a_window():
    model = lively_model("mistral")

    @torch.no_grad()
    def body(net):
        cache = net(torch.cat([IDS, IDS], 1), use_cache=True, logits_to_keep=1).past_key_values
        with pytest.raises(ValueError, match="negative"):
            cache.crop(3)
        return slug_of(ModelError, lambda: cache.crop(-2))

    assert on_ranks(model, {"cp": 2}, body) == ["crop-past-window"] * 2


def test_a_classifier_with_a_cache():
    from tests.axes.context.two_ranks import llama_head

    model = llama_head("LlamaForSequenceClassification", num_labels=3).eval()

    @torch.no_grad()
    def body(net):
        return slug_of(ModelError, lambda: net(IDS, use_cache=True))

    assert on_ranks(model, {"cp": 2}, body) == ["one-row"] * 2
