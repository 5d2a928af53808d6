"""Decoding with a cache of fixed size, whose forward a CUDA graph may repeat. Here a graph is a forward that is run
again.

On a GPU: test_captured_decoding_cuda.py.
"""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager

import pytest
import torch

from parallelize import ModelError, build_mesh, generate, parallelize_module
from parallelize.axes.vocabulary.generation import caches as fixed_cache
from parallelize.axes.vocabulary.generation import captured_decoding, loop
from parallelize.axes.vocabulary.generation.caches import set_length, why_not_fixed, with_fixed_room
from parallelize.axes.vocabulary.generation.captured_decoding import CapturedDecoding, why_not
from parallelize.axes.vocabulary.sampling import candidates, noise
from tests.axes.vocabulary.generation import generation_jobs
from tests.axes.vocabulary.generation.generation_jobs import SAMPLED, lively_model, ours, prompts
from tests.support.models import FAMILIES
from tests.support.threads import run_ranks

cache_utils = pytest.importorskip("transformers.cache_utils")
masking_utils = pytest.importorskip("transformers.masking_utils")
DECODERS = [family for family in FAMILIES if family != "bert"]


class Again:
    """A graph that runs the forward again, into the same logits, to which `errors` are added replay by replay."""

    made = 0

    def __init__(self, decoding: CapturedDecoding, errors: list[torch.Tensor | float]):
        Again.made += 1
        self.decoding, self.errors = decoding, list(errors)
        decoding._run()
        self.logits, self.drawn = decoding.candidates.logits, decoding.drawn
        set_length(decoding.key_values, decoding.tokens)

    def replay(self) -> None:
        decoding = self.decoding
        shown = decoding.candidates, decoding.drawn
        decoding._run()
        self.logits.copy_(decoding.candidates.logits + (self.errors.pop(0) if self.errors else 0.0))
        if self.drawn is not None:
            self.drawn.copy_(self.logits.argmax(-1) if decoding.options.greedy else decoding.drawn)
        decoding.candidates, decoding.drawn = shown


@pytest.fixture
def graphs(monkeypatch):
    """`graphs(*errors)` replaces CUDA graphs; a cache of them has room for 5 more tokens."""

    def replace(*errors: torch.Tensor | float) -> None:
        monkeypatch.setattr(CapturedDecoding, "_capture", lambda decoding: (Again(decoding, list(errors)), ""))
        monkeypatch.setattr(captured_decoding, "_MIN_ROOM", 5)
        monkeypatch.setattr(captured_decoding, "_ROOM_STEP", 1)
        monkeypatch.setattr(loop._DrawnTokens, "_captures", as_on_gpu)
        for module in (candidates, noise):
            monkeypatch.setattr(module, "avoids_waits", lambda device, count: True)
        Again.made = 0

    return replace


def as_on_gpu(tokens, ids, new: int) -> bool:
    return tokens.cuda_graph is not False and not why_not(tokens.model, tokens.cache, ids.shape[1], ids.device)


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("family", DECODERS)
def test_tokens_are_those_of_a_growing_cache(graphs, family):
    model = lively_model(family)
    graphs()
    for options in ({"temperature": 0.0}, SAMPLED):
        expected = ours(model, family, max_new_tokens=14, cuda_graph=False, **options)
        assert torch.equal(ours(model, family, max_new_tokens=14, **options), expected)
    if model._can_compile_fullgraph:
        assert Again.made == 6  # twice three caches: of 7 tokens, of 12 and of 17


def test_a_planned_model(graphs):
    model = lively_model("llama")
    expected, models = ours(model, max_new_tokens=9), [copy.deepcopy(model) for _ in range(2)]
    graphs()

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), sequence_parallel=True, loss_parallel=True)
        return ours(models[rank], max_new_tokens=9)

    assert all(torch.equal(actual, expected) for actual in run_ranks(2, body))
    assert Again.made == 4


@pytest.mark.parametrize("draws", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_log_probs_are_of_each_replay_s_logits(graphs, draws):
    model = lively_model("llama")
    tokens, expected = ours(model, max_new_tokens=14, cuda_graph=False, output_log_probs=True, **draws)
    graphs()
    actual, log_probs = ours(model, max_new_tokens=14, output_log_probs=True, **draws)
    assert Again.made == 3 and torch.equal(actual, tokens)
    torch.testing.assert_close(log_probs, expected, rtol=1e-6, atol=1e-6)  # attention's mask is another


@pytest.mark.parametrize("replay", [0, 1])
def test_a_graph_that_gives_other_logits_gives_no_token(graphs, replay):
    """The first replay and the second are compared before their tokens are used: here they would be token 5."""
    model = lively_model("llama")
    expected = ours(model, max_new_tokens=14, temperature=0.0, cuda_graph=False)
    other = torch.zeros(67, dtype=torch.float64)
    other[5] = 1e3
    graphs(*[0.0] * replay, other)
    with pytest.warns(RuntimeWarning, match="replay of its captured|its captured forward gives other logits"):
        actual = ours(model, max_new_tokens=14, temperature=0.0)
    assert Again.made == 1 and torch.equal(actual, expected)


def test_a_fixed_cache_that_changes_logits_is_not_used(graphs, monkeypatch):
    """As attention that reads no mask would: it sees the empty places."""
    model = lively_model("llama")
    expected = ours(model, max_new_tokens=9, cuda_graph=False)
    graphs()
    stock = captured_decoding.with_fixed_room

    def with_fewer_tokens(cache, tokens, room):
        fixed = stock(cache, tokens, room)
        fixed.layers[0].keys[:, :, 0] += 1.0
        return fixed

    monkeypatch.setattr(captured_decoding, "with_fixed_room", with_fewer_tokens)
    with pytest.warns(RuntimeWarning, match="with a cache of fixed size gives other logits"):
        actual = ours(model, max_new_tokens=9)
    assert Again.made == 0 and torch.equal(actual, expected)


def test_attention_that_reads_no_mask_is_noticed(graphs, monkeypatch):
    """It sees the empty places of a fixed cache, with a graph and without."""
    model = lively_model("llama")
    graphs()
    stock = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def all_seen(*args, **kwargs):
        mask = stock(*args, **kwargs)
        return mask if mask is None or mask.shape[-2] > 1 else torch.ones_like(mask)

    ids = prompts("gemma2")[0]  # without padding, which needs a mask
    expected = generate(model, ids, max_new_tokens=9, eos_token_id=[], cuda_graph=False)
    monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", all_seen)
    with pytest.warns(RuntimeWarning, match="with a cache of fixed size gives other logits"):
        actual = generate(model, ids, max_new_tokens=9, eos_token_id=[])
    assert Again.made == 0 and torch.equal(actual, expected)


def test_one_rank_without_a_graph(graphs, monkeypatch, recwarn):
    """All ranks go on without one: what they send to each other may depend on it."""
    model = lively_model("llama")
    expected, models = ours(model, max_new_tokens=9), [copy.deepcopy(model) for _ in range(2)]
    graphs()
    stock = CapturedDecoding._capture

    def capture(decoding):
        graph = stock(decoding)  # which sends, as a graph that is captured does not
        return (None, "its forward cannot be captured (out of memory)") if decoding.groups[0].rank == 1 else graph

    monkeypatch.setattr(CapturedDecoding, "_capture", capture)

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), loss_parallel=True)
        return ours(models[rank], max_new_tokens=9)

    assert all(torch.equal(actual, expected) for actual in run_ranks(2, body))
    texts = {str(w.message) for w in recwarn if "CUDA graph" in str(w.message)}
    assert len(texts) == 2 and any("another rank cannot use a graph" in text for text in texts)


@pytest.mark.parametrize("rank_that_waits", [0, 1])
def test_a_wait_of_the_first_forward_alone_is_none(graphs, monkeypatch, rank_that_waits, recwarn):
    """Compiled layers are compiled in it."""
    model = lively_model("llama")
    expected, models = ours(model, max_new_tokens=9), [copy.deepcopy(model) for _ in range(2)]
    graphs()
    rank_of_thread, once = threading.local(), set[int]()

    @contextmanager
    def noted(places: list[str]):
        if rank_of_thread.value == rank_that_waits and rank_that_waits not in once:
            once.add(rank_that_waits)
            places.append("compiler.py:1")
        yield

    monkeypatch.setattr(captured_decoding.private_cuda, "noted_waits", noted)

    def body(rank):
        rank_of_thread.value = rank
        parallelize_module(models[rank], build_mesh("cpu", tp=2), loss_parallel=True)
        return ours(models[rank], max_new_tokens=9)

    assert all(torch.equal(actual, expected) for actual in run_ranks(2, body))
    assert once and Again.made and not [w for w in recwarn if "CUDA graph" in str(w.message)]


def test_a_forward_that_always_waits_is_not_captured(graphs, monkeypatch):
    model = lively_model("llama")
    expected = ours(model, max_new_tokens=9)
    graphs()

    @contextmanager
    def noted(places: list[str]):
        places.append("layer.py:2")
        yield

    monkeypatch.setattr(captured_decoding.private_cuda, "noted_waits", noted)
    with pytest.warns(RuntimeWarning, match=r"waits for the GPU at layer\.py:2") as warned:
        assert torch.equal(ours(model, max_new_tokens=9), expected)
    assert warned[0].filename == generation_jobs.__file__  # of `ours`, which calls `generate`
    assert not Again.made


def test_a_graph_that_is_demanded_and_fails(graphs, monkeypatch):
    graphs()
    monkeypatch.setattr(CapturedDecoding, "_capture", lambda decoding: (None, "its forward cannot be captured (why)"))
    with pytest.raises(ModelError, match=r"no-cuda-graph.*LlamaForCausalLM: its forward cannot be captured \(why\)"):
        ours(lively_model("llama"), max_new_tokens=9, cuda_graph=True)


def test_a_graph_that_is_demanded_and_cannot_be():
    model = lively_model("llama")
    ids, _ = prompts()
    with pytest.raises(ModelError, match=r"no-cuda-graph.*LlamaForCausalLM runs on cpu"):
        generate(model, ids, max_new_tokens=9, cuda_graph=True)


def test_why_a_model_is_not_captured():
    model, cache, device = lively_model("llama"), cache_utils.DynamicCache(), torch.device("cpu")
    assert "layers other than" in why_not(model, cache, 5, device)
    cache.update(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), 0)
    assert why_not(model, cache, 5, device) == ""
    assert "layers other than" in why_not(model, cache, 4, device)  # more keys than tokens: a prefix of virtual ones
    assert "on other devices than cuda:1" in why_not(model, cache, 5, torch.device("cuda", 1))
    model.config._attn_implementation = "flash_attention_2"
    assert "attention by flash_attention_2" in why_not(model, cache, 5, device)
    model._can_compile_fullgraph = False
    assert "_can_compile_fullgraph" in why_not(model, cache, 5, device)


def test_a_sliding_layer_keeps_its_last_tokens_where_they_belong():
    sliding = cache_utils.DynamicSlidingWindowLayer(sliding_window=4)
    keys, values = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 4)
    sliding.update(keys, values)
    cache = cache_utils.DynamicCache()
    cache.layers = [sliding]
    assert why_not_fixed(cache, 6) == ""
    fixed = with_fixed_room(cache, 6, 8)
    assert int(fixed.get_seq_length()) == 6 and fixed.layers[0].keys.shape == (2, 3, 8, 4)
    assert torch.equal(fixed.layers[0].keys[:, :, 3:6], keys[:, :, 3:])
    assert torch.equal(fixed.layers[0].values[:, :, 3:6], values[:, :, 3:])
    assert (fixed.layers[0].values[:, :, 6:] == 64.0).all()  # hidden by masks, and noticed where they are not read
    assert sliding.keys is not None
    more, _ = fixed.update(keys[:, :, :1], values[:, :, :1], 0)
    assert torch.equal(more[:, :, 6], keys[:, :, 0])
    larger = with_fixed_room(fixed, 7, 20)
    assert torch.equal(larger.layers[0].keys[:, :, 3:7], more[:, :, 3:7]) and int(larger.get_seq_length()) == 7
    assert fixed.layers[0].keys is None  # one layer at a time exists twice


def test_other_layers_are_refused(monkeypatch):
    cache = cache_utils.DynamicCache()
    assert why_not_fixed(cache, 3) and why_not_fixed(None, 3)
    cache.update(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), 0)
    monkeypatch.setattr(fixed_cache, "_static_layer", lambda: None)
    assert "a version of transformers" in why_not_fixed(cache, 5)
    cache.layers = [cache_utils.StaticLayer(max_cache_len=3)]
    assert "layers other than" in why_not_fixed(cache, 3)
