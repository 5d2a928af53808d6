"""Decoding with a cache of fixed size, whose forward a CUDA graph may repeat. Here a graph is a forward that is run again.

On a GPU: test_captured_decoding_cuda.py.
"""

from __future__ import annotations

import copy

import pytest
import torch

from parallelize import ModelError, build_mesh, generate, parallelize_module
from parallelize.vocabulary.generation import captured_decoding, loop
from parallelize.vocabulary.generation.captured_decoding import CapturedDecoding, why_not
from parallelize.vocabulary.generation.fixed_cache import can_be_fixed, set_length, with_fixed_room
from parallelize.vocabulary.sampling import candidates, noise
from tests.support.models import FAMILIES
from tests.support.threads import run_ranks
from tests.vocabulary.generation.generation_jobs import SAMPLED, lively_model, ours, prompts

cache_utils = pytest.importorskip("transformers.cache_utils")
DECODERS = [family for family in FAMILIES if family != "bert"]


class Again:
    """A graph that runs the forward again, into the same logits."""

    made = 0

    def __init__(self, decoding: CapturedDecoding, error: float):
        Again.made += 1
        self.decoding, self.error = decoding, error
        decoding._run()
        self.logits, self.drawn = decoding.candidates.logits, decoding.drawn
        set_length(decoding.key_values, decoding.tokens)

    def replay(self) -> None:
        decoding = self.decoding
        shown = decoding.candidates, decoding.drawn
        decoding._run()
        self.logits.copy_(decoding.candidates.logits + self.error)
        if self.drawn is not None:
            self.drawn.copy_(decoding.drawn)
        decoding.candidates, decoding.drawn = shown


@pytest.fixture
def graphs(monkeypatch):
    """`graphs(error)` replaces CUDA graphs; a cache of them has room for 3 more tokens."""

    def replace(error: float = 0.0) -> None:
        def capture(decoding: CapturedDecoding) -> None:
            if not decoding.is_refused:
                decoding.graph = Again(decoding, error)

        monkeypatch.setattr(CapturedDecoding, "_capture", capture)
        monkeypatch.setattr(captured_decoding, "_LEAST_ROOM", 5)
        monkeypatch.setattr(captured_decoding, "_ROOM_STEP", 1)
        captures = lambda tokens, ids, new: tokens.cuda_graph and not why_not(tokens.model, tokens.cache)  # noqa: E731
        monkeypatch.setattr(loop._DrawnTokens, "_captures", captures)
        for module in (candidates, noise):  # as on a GPU
            monkeypatch.setattr(module, "avoids_waits", lambda device, count: True)
        Again.made = 0

    return replace


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("family", DECODERS)
def test_tokens_are_those_of_a_growing_cache(graphs, family):
    model = lively_model(family)
    graphs()
    for options in ({"temperature": 0.0}, SAMPLED):
        expected = ours(model, family, max_new_tokens=14, **options)
        assert torch.equal(ours(model, family, max_new_tokens=14, cuda_graph=True, **options), expected)
    if model._can_compile_fullgraph:
        assert Again.made == 6  # twice three caches: of 7 tokens, of 12 and of 17


def test_a_planned_model(graphs):
    model = lively_model("llama")
    expected, models = ours(model, max_new_tokens=9), [copy.deepcopy(model) for _ in range(2)]
    graphs()

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), sequence_parallel=True, loss_parallel=True)
        return ours(models[rank], max_new_tokens=9, cuda_graph=True)

    assert all(torch.equal(actual, expected) for actual in run_ranks(2, body))
    assert Again.made == 4


def test_a_graph_that_gives_other_logits_is_not_used(graphs):
    """The second replay is checked; the first token from a graph is its first replay."""
    model = lively_model("llama")
    graphs(error=1e-3)
    with pytest.warns(RuntimeWarning, match="a replay of its captured forward gives other logits"):
        actual = ours(model, max_new_tokens=14, temperature=0.0, cuda_graph=True)
    assert Again.made == 1
    assert torch.equal(actual, ours(model, max_new_tokens=14, temperature=0.0))


def test_a_forward_that_cannot_be_captured_runs(graphs, monkeypatch):
    graphs()
    model = lively_model("llama")
    monkeypatch.undo()
    monkeypatch.setattr(loop._DrawnTokens, "_captures", lambda *args: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)

    def refuse(*args, **kwargs):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    with pytest.warns(RuntimeWarning, match=r"cannot be captured \(operation not permitted\)\. cuda_graph=False"):
        actual = ours(model, max_new_tokens=9)
    monkeypatch.undo()
    assert torch.equal(actual, ours(model, max_new_tokens=9))


def test_a_graph_that_is_demanded_and_cannot_be():
    model = lively_model("llama")
    ids, _ = prompts()
    with pytest.raises(ModelError, match=r"no-cuda-graph.*LlamaForCausalLM runs on cpu"):
        generate(model, ids, max_new_tokens=9, cuda_graph=True)


def test_why_a_model_is_not_captured():
    model, cache = lively_model("llama"), cache_utils.DynamicCache()
    assert "layers other than" in why_not(model, cache)
    cache.update(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), 0)
    assert why_not(model, cache) == ""
    model._can_compile_fullgraph = False
    assert "_can_compile_fullgraph" in why_not(model, cache)


def test_a_sliding_layer_keeps_its_last_tokens_where_they_belong():
    sliding = cache_utils.DynamicSlidingWindowLayer(sliding_window=4)
    keys, values = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 4)
    sliding.update(keys, values)
    cache = cache_utils.DynamicCache()
    cache.layers = [sliding]
    assert can_be_fixed(cache)
    fixed = with_fixed_room(cache, 6, 8)
    assert int(fixed.get_seq_length()) == 6 and fixed.layers[0].keys.shape == (2, 3, 8, 4)
    assert torch.equal(fixed.layers[0].keys[:, :, 3:6], keys[:, :, 3:])
    assert torch.equal(fixed.layers[0].values[:, :, 3:6], values[:, :, 3:])
    more, _ = fixed.update(keys[:, :, :1], values[:, :, :1], 0)
    assert torch.equal(more[:, :, 6], keys[:, :, 0])
    larger = with_fixed_room(fixed, 7, 20)
    assert torch.equal(larger.layers[0].keys[:, :, 3:7], more[:, :, 3:7]) and int(larger.get_seq_length()) == 7


def test_other_layers_are_refused():
    cache = cache_utils.DynamicCache()
    assert not can_be_fixed(cache) and not can_be_fixed(None)
    cache.layers = [cache_utils.StaticLayer(max_cache_len=3)]
    assert not can_be_fixed(cache)
