"""Optimizer state in host memory: the same numbers, and on the device some parameters at a time."""

from __future__ import annotations

import gc
import weakref
from copy import deepcopy

import pytest
import torch

from parallelize import Muon, build_optimizer
from parallelize.base.errors import ModelError
from parallelize.base.torch_private.torch_tensors import plain_local
from parallelize.state.loop import local_optimizer as offloaded_state
from tests.state.optimizers import muon_jobs as jobs
from tests.support.models import tiny_model
from tests.support.refused import Block, refused
from tests.support.threads import run_ranks

CLASSES = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, Muon]


class StandInDevice:
    """Copies of state that are "on the device", which on a CPU is the host: what exists is counted."""

    def __init__(self, monkeypatch, chunk_bytes):
        self.live, self.peak, self.moves = {}, 0, 0
        monkeypatch.setattr(offloaded_state, "to_device", lambda value, device: self.moved(value))
        monkeypatch.setattr(offloaded_state, "to_host", self.home)
        monkeypatch.setattr(offloaded_state, "CHUNK_BYTES", chunk_bytes)

    def moved(self, value):
        copy = value.clone()
        self.live[id(copy)] = copy.numel() * copy.element_size()
        weakref.finalize(copy, self.live.pop, id(copy), None)
        self.moves += 1
        self.peak = max(self.peak, sum(self.live.values()))
        return copy

    def home(self, value):
        return value.clone()


def stepped(model, optimizer, steps=3):
    for seed in range(steps):
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * seed + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("cls", CLASSES)
def test_steps_are_the_same_and_state_comes_home(cls, monkeypatch):
    options = {"lr": 0.1} if cls is not torch.optim.SGD else {"lr": 0.1, "momentum": 0.9}
    base = Block()
    expected_model, model = deepcopy(base), deepcopy(base)
    expected = stepped(expected_model, build_optimizer(expected_model, cls, **options))
    device = StandInDevice(monkeypatch, 400)
    optimizer = build_optimizer(model, cls, offload_state=True, **options)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    assert all(map(torch.equal, stepped(model, optimizer), expected))
    gc.collect()
    assert calls == ["after"] * 3 and device.moves and not device.live, "nothing stays on the device"
    if cls is torch.optim.AdamW:
        largest = max(p.numel() for p in model.parameters()) * 4
        assert device.peak <= 2 * max(400, largest), "two moments of one chunk"


@pytest.mark.sweep
def test_shards_are_offloaded_too(monkeypatch):
    base = tiny_model("llama", torch.float64)
    StandInDevice(monkeypatch, 4000)

    def body(rank):
        def build(offload):
            def of(parallel):
                return parallel.optimizer(torch.optim.AdamW, lr=1e-2, offload_state=offload)

            return of

        weights = [
            jobs.trained(rank, base, {"dp": 2, "tp": 2}, {"zero": 1}, optimizer=build(offload))[0]
            for offload in (False, True)
        ]
        return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    assert run_ranks(4, body) == [True] * 4


def test_state_dicts_and_loading_keep_state_at_home(monkeypatch):
    base = Block()
    first, second = deepcopy(base), deepcopy(base)
    StandInDevice(monkeypatch, 400)
    optimizer = build_optimizer(first, torch.optim.AdamW, offload_state=True)
    stepped(first, optimizer, 2)
    second.load_state_dict(first.state_dict())
    loaded = build_optimizer(second, torch.optim.AdamW, offload_state=True)
    loaded.load_state_dict(deepcopy(optimizer.state_dict()))  # PyTorch shares step counts
    assert all(plain_local(v).device.type == "cpu" for s in loaded.state.values() for v in s.values())
    assert all(map(torch.equal, stepped(second, loaded), stepped(first, optimizer)))


def test_lbfgs_which_calls_its_closure_again_is_refused():
    with refused(ModelError, "state-not-offloaded", "LBFGS"):
        build_optimizer(Block(), torch.optim.LBFGS, offload_state=True)
