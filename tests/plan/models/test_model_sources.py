"""Models by name, by config and by function."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallelize import lint
from parallelize.base.errors import ModelError
from parallelize.plan.models.model_source import default_inputs, parse_overrides, read_model, source_of
from tests.support.models import tiny_model


def test_overrides():
    assert parse_overrides(["a=2", "b=relu", "c=[1, 2]", "d=true"]) == {"a": 2, "b": "relu", "c": [1, 2], "d": True}
    with pytest.raises(ModelError):
        parse_overrides(["a"])
    with pytest.raises(ModelError) as caught:
        read_model("llama", {"num_hiden_layers": 2})
    assert "num_hidden_layers" in str(caught.value)


def test_a_module_is_copied_and_not_called():
    model = tiny_model("llama", tie_word_embeddings=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    built = source_of(model).build("meta")
    assert all(parameter.is_meta for parameter in built.parameters())
    assert built.lm_head.weight is built.model.embed_tokens.weight
    assert [(n, p.shape) for n, p in built.named_parameters()] == [(n, p.shape) for n, p in model.named_parameters()]
    assert lint(model, "llama", "tp=2") == lint(lambda: tiny_model("llama", tie_word_embeddings=True), "llama", "tp=2")
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_config_is_a_model_too():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4)
    source = source_of(config, {"num_hidden_layers": 1})
    assert (source.text, source.config.num_hidden_layers, config.num_hidden_layers) == ("llama", 1, 32)
    assert source.build("meta").model.embed_tokens.weight.shape == (64, 32)
    with pytest.raises(ModelError, match="num_hiden_layers"):
        source_of(config, {"num_hiden_layers": 1})
    with pytest.raises(ModelError, match="bad-config"):
        source_of(transformers.LlamaConfig(num_hidden_layers=10**6))


def test_ids_are_in_the_vocabulary_of_the_text_whatever_other_tables_there_are():
    """As of a tower with more positions than the text has tokens, whose images are not known."""
    model = nn.ModuleDict({"positions": nn.Embedding(500, 2), "tokens": nn.Embedding(7, 2)})
    model.config = SimpleNamespace(text_config=SimpleNamespace(vocab_size=7))
    assert int(default_inputs(model, 50, 4)["targets"].max()) < 7
