"""Decoding from CUDA graphs gives the tokens of forwards that are not captured, and is refused where it cannot be
captured."""

from __future__ import annotations

import pytest
import torch

from parallelize import build_mesh, generate, parallelize_module
from parallelize.axes.vocabulary.generation import captured_decoding
from parallelize.axes.vocabulary.generation.captured_decoding import CapturedDecoding
from tests.axes.vocabulary.generation.generation_jobs import SAMPLED, lively_model, ours, prompts
from tests.support import device
from tests.support.models import FAMILIES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EAGER_EXPERTS = {"mixtral", "deepseek_v3", "gpt_oss"}  # of float32: their loop waits for the router's choice
DECODERS = [family for family in FAMILIES if family != "bert"]


def on_gpu(model, family="", **how):
    ids, mask = (x.cuda() for x in prompts(family))
    options = {"max_new_tokens": 20, "eos_token_id": [], "pad_token_id": 0} | how
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
    rooms, replay = [], CapturedDecoding._replay
    monkeypatch.setattr(CapturedDecoding, "_replay", lambda self: (rooms.append(self.room), replay(self)))
    monkeypatch.setattr(captured_decoding, "_MIN_ROOM", 20)
    monkeypatch.setattr(captured_decoding, "_ROOM_STEP", 1)
    actual = on_gpu(model, max_new_tokens=50, cuda_graph=True)
    assert torch.equal(actual, on_gpu(model, max_new_tokens=50, cuda_graph=False))
    assert rooms == [27] * 20 + [47] * 20 + [57] * 9


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_compiled_layers_are_captured(monkeypatch):
    """They are compiled in a forward of the prompt and in one with the fixed cache, which wait."""
    monkeypatch.setattr(
        torch._inductor.config, "compile_threads", 1
    )  # no pool of processes, which would outlive the test
    model = lively_model("llama", torch.float32).cuda()
    expected = on_gpu(model, cuda_graph=False)
    for layer in model.model.layers:
        layer.compile()
    assert torch.equal(on_gpu(model, cuda_graph=True), expected)


def test_a_forward_that_waits_for_the_gpu_runs_without_a_graph():
    model = lively_model("llama", torch.float32).cuda()
    expected = on_gpu(model, cuda_graph=False)
    model.model.layers[1].register_forward_hook(lambda module, args, out: out if bool(out.isfinite().all()) else None)
    with pytest.warns(RuntimeWarning, match=r"waits for the GPU at .*test_captured_decoding_cuda\.py:\d+"):
        actual = on_gpu(model)
    assert torch.equal(actual, expected)


def test_a_capture_that_fails_leaves_nothing_behind():
    """`synchronize` is not noted as a wait, and ends a capture."""
    model = lively_model("llama", torch.float32).cuda()
    expected = on_gpu(model, cuda_graph=False)
    handle = model.model.layers[1].register_forward_hook(lambda module, args, out: torch.cuda.synchronize())
    stream = torch.cuda.current_stream()
    with pytest.warns(RuntimeWarning, match="cannot be captured"):
        assert torch.equal(on_gpu(model), expected)
    assert torch.cuda.current_stream() == stream
    torch.rand(3, device="cuda")
    torch.cuda.empty_cache()
    handle.remove()
    assert torch.equal(on_gpu(model, cuda_graph=True), expected)


def test_a_forward_with_a_state_of_its_own_is_not_replayed():
    """A number that Python counts is the same in each replay."""
    model = lively_model("llama", torch.float32).cuda()
    calls = iter(range(1, 1000))
    model.model.norm.register_forward_hook(lambda module, args, out: out * (1.0 + next(calls)))
    with pytest.warns(RuntimeWarning, match="other logits"):
        on_gpu(model)


def test_every_replay_gives_its_own_token(monkeypatch):
    """A second replay that differs is found before its token is used."""
    model = lively_model("llama", torch.float32).cuda()
    expected = on_gpu(model, temperature=0.0, cuda_graph=False)
    replay, count = CapturedDecoding._replay, iter(range(1000))

    def wrong_from_the_second_on(self):
        replay(self)
        if next(count):
            self.candidates.logits.fill_(0.0)
            self.drawn.fill_(5)

    monkeypatch.setattr(CapturedDecoding, "_replay", wrong_from_the_second_on)
    with pytest.warns(RuntimeWarning, match="another replay of its captured forward"):
        assert torch.equal(on_gpu(model, temperature=0.0), expected)


def _planned(rank: int) -> tuple[bool, int]:
    """(whether tokens are the unsharded model's, how many came from a graph)."""
    model = lively_model("llama", torch.float32)
    expected = ours(model, max_new_tokens=20, cuda_graph=False)
    planned = parallelize_module(
        lively_model("llama", torch.float32), build_mesh("cpu", tp=2), sequence_parallel=True, loss_parallel=True
    )
    replays, replay = [], CapturedDecoding._replay
    CapturedDecoding._replay = lambda self: (replays.append(1), replay(self))
    try:
        actual = ours(planned, max_new_tokens=20, cuda_graph=True)
    finally:
        CapturedDecoding._replay = replay
    return torch.equal(actual, expected), len(replays)


@pytest.mark.skipif(device.CHOSEN != "cuda", reason="PARALLELIZE_TEST_DEVICE=cuda runs it")
def test_two_ranks(two_processes):
    assert two_processes.run(_planned) == [(True, 19)] * 2
