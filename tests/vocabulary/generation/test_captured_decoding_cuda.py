"""Decoding from CUDA graphs gives the tokens of forwards that are not captured, and is refused where it cannot be captured."""

from __future__ import annotations

import pytest
import torch

from parallelize import build_mesh, destroy_groups, generate, parallelize_module
from parallelize.vocabulary.generation.captured_decoding import CapturedDecoding
from tests.support import device
from tests.support.models import FAMILIES
from tests.vocabulary.generation.generation_jobs import SAMPLED, lively_model, ours, prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EAGER_EXPERTS = {"mixtral", "deepseek_v3", "gpt_oss"}  # of float32: their loop waits for the router's choice
DECODERS = [family for family in FAMILIES if family != "bert"]


def on_gpu(model, family="", **how):
    ids, mask = (x.cuda() for x in prompts(family))
    options = {"max_new_tokens": 14, "eos_token_id": [], "pad_token_id": 0} | how
    return generate(model, ids, attention_mask=mask, **options)


@pytest.mark.parametrize("family", DECODERS)
def test_tokens_are_those_without_a_graph(family, recwarn):
    model = lively_model(family, torch.float32).cuda()
    for options in ({"temperature": 0.0}, SAMPLED):
        expected = on_gpu(model, family, cuda_graph=False, **options)
        assert torch.equal(on_gpu(model, family, **options), expected)
    warned = [w for w in recwarn if "without a CUDA graph" in str(w.message)]
    assert bool(warned) == (family in EAGER_EXPERTS)


def test_a_graph_is_used_and_a_longer_cache_has_another(monkeypatch):
    model = lively_model("llama", torch.float32).cuda()
    captures = []
    stock = CapturedDecoding._capture
    monkeypatch.setattr(CapturedDecoding, "_capture", lambda self: (captures.append(self.room), stock(self))[1])
    assert torch.equal(
        on_gpu(model, max_new_tokens=50, cuda_graph=True), on_gpu(model, max_new_tokens=50, cuda_graph=False)
    )
    assert captures == [64]


def test_a_forward_that_waits_for_the_gpu_runs_without_a_graph():
    model = lively_model("llama", torch.float32).cuda()
    expected = on_gpu(model, cuda_graph=False)
    model.model.layers[1].register_forward_hook(lambda module, args, out: out if bool(out.isfinite().all()) else None)
    with pytest.warns(RuntimeWarning, match="cannot be captured"):
        actual = on_gpu(model)
    assert torch.equal(actual, expected)


def test_a_forward_with_a_state_of_its_own_is_not_replayed():
    """A number that Python counts is the same in each replay."""
    model = lively_model("llama", torch.float32).cuda()
    calls = iter(range(1, 1000))
    model.model.norm.register_forward_hook(lambda module, args, out: out * (1.0 + next(calls)))
    with pytest.warns(RuntimeWarning, match="other logits"):
        on_gpu(model)


def _planned(rank: int) -> tuple[bool, int]:
    model = lively_model("llama", torch.float32)
    expected = ours(model, max_new_tokens=12, cuda_graph=False)
    planned = parallelize_module(
        lively_model("llama", torch.float32), build_mesh("cpu", tp=2), sequence_parallel=True, loss_parallel=True
    )
    count, stock = [], CapturedDecoding._capture
    CapturedDecoding._capture = lambda self: (stock(self), count.append(self.graph))[0]
    try:
        actual = ours(planned, max_new_tokens=12, cuda_graph=True)
    finally:
        CapturedDecoding._capture = stock
        destroy_groups()
    return torch.equal(actual, expected), sum(graph is not None for graph in count)


@pytest.mark.skipif(device.CHOSEN != "cuda", reason="PARALLELIZE_TEST_DEVICE=cuda runs it")
def test_two_ranks(two_processes):
    assert two_processes.run(_planned) == [(True, 1)] * 2
