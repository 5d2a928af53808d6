"""Checkpoints and folders of the Hub with another number of tokens: those that both have are read, on every mesh."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from parallelize import (
    Checkpointer,
    build_mesh,
    full_state_dict,
    load_checkpoint,
    load_pretrained,
    parallelize_model,
    parallelize_module,
    save_pretrained,
)
from parallelize.base.errors import CheckpointError
from tests.state.optimizers.muon_jobs import set_gradients
from tests.support.models import tiny_model
from tests.support.own_optimizers import Shampoo
from tests.support.refused import refused
from tests.support.threads import run_ranks

MESHES = {
    "tp2": ({"tp": 2}, {}),
    "dp2-zero1": ({"dp": 2}, {"zero": 1}),
    "dp2-zero3": ({"dp": 2}, {"zero": 3}),
    "pp2": ({"pp": 2}, {"num_microbatches": 2}),
}
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def llama(tokens, scale=1.0):
    model = tiny_model("llama", torch.float32, vocab_size=tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def on_ranks(mesh, base, run):
    """run(parallel) on each rank."""
    axes, options = MESHES[mesh]
    models = [deepcopy(base) for _ in range(2)]
    return run_ranks(2, lambda rank: run(parallelize_model(models[rank], build_mesh("cpu", **axes), **options)))


def full(parallel):
    return {name: value.clone() for name, value in full_state_dict(parallel.module, every_rank=True).items()}


def check(actual, saved, own):
    for name, value in saved.items():
        common = min(len(value), len(own[name])) if name in ENDS else len(value)
        assert torch.equal(actual[name][:common], value[:common]), name
        assert torch.equal(actual[name][common:], own[name][common:]), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary")

    def save(parallel):
        save_pretrained(parallel, path / "hub")
        with Checkpointer(path / "run", parallel) as checkpoints:
            checkpoints.save(1)

    on_ranks("tp2", llama(67), save)
    return path


@pytest.mark.parametrize("tokens", [72, 61])
@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_that_both_have_are_loaded(folder, mesh, tokens):
    saved, own = llama(67).state_dict(), llama(tokens, 0.5)

    def run(parallel):
        load_pretrained(parallel, folder / "hub", resize_vocabulary=True)
        of_hub = full(parallel)
        with torch.no_grad():
            for parameter in parallel.module.parameters():
                parameter.mul_(3.0)
        tripled = full(parallel)
        load_checkpoint(folder / "run", parallel, resize_vocabulary=True)
        return of_hub, tripled, full(parallel)

    for of_hub, tripled, of_run in on_ranks(mesh, own, run):
        check(of_hub, saved, own.state_dict())
        check(of_run, saved, tripled)


def test_it_is_asked_for(folder):
    def run(parallel):
        with refused(CheckpointError, "wrong-shape", "[67, ", "resize_vocabulary=True"):
            load_pretrained(parallel, folder / "hub")
        with refused(CheckpointError, "wrong-shape", "[67, ", "resize_vocabulary=True"):
            load_checkpoint(folder / "run", parallel)
        return full(parallel)

    own = llama(72, 0.5)
    for weights in on_ranks("tp2", own, run):
        assert all(torch.equal(weights[name], value) for name, value in own.state_dict().items())


def test_another_size_is_still_refused(folder):
    own = tiny_model("llama", torch.float32, vocab_size=72, intermediate_size=96)

    def run(parallel):
        for load, source in ((load_pretrained, "hub"), (lambda p, f, **o: load_checkpoint(f, p, **o), "run")):
            with refused(CheckpointError, "wrong-shape", "mlp"):
                load(parallel, folder / source, resize_vocabulary=True)

    on_ranks("tp2", own, run)


def planned_on_meta(tokens, run):
    """run(module) of a model on the meta device on two ranks of tp."""
    models = [llama(tokens).to("meta") for _ in range(2)]
    return run_ranks(2, lambda rank: run(parallelize_module(models[rank], build_mesh("cpu", tp=2))))


def test_a_model_on_the_meta_device_has_no_rows_to_keep(folder):
    def run(module):
        for load, source in ((load_pretrained, "hub"), (lambda p, f, **o: load_checkpoint(f, p, **o), "run")):
            with refused(CheckpointError, "missing-rows", "tokens 67 to 71", "initialize"):
                load(module, folder / source, resize_vocabulary=True)
        assert all(parameter.is_meta for parameter in module.parameters())

    planned_on_meta(72, run)


@pytest.mark.parametrize("source", ["hub", "run"])
def test_fewer_tokens_are_loaded_from_the_meta_device(folder, source):
    def run(module):
        if source == "hub":
            load_pretrained(module, folder / source, resize_vocabulary=True)
        else:
            load_checkpoint(folder / source, module, resize_vocabulary=True)
        return full_state_dict(module, every_rank=True)

    saved = llama(67).state_dict()
    for weights in planned_on_meta(61, run):
        check(weights, saved, llama(61).state_dict())


class Positions(nn.Module):
    """A model that says nothing of its embeddings."""

    def __init__(self, tokens, length):
        super().__init__()
        self.positions = nn.Embedding(length, 6)
        self.tokens = nn.Embedding(tokens, 6)
        self.head = nn.Linear(6, tokens)


@pytest.mark.parametrize(("tokens", "length", "is_read"), [(9, 4, True), (7, 5, False), (9, 5, False)])
def test_the_vocabulary_is_that_of_the_head(tmp_path, tokens, length, is_read):
    def run(rank):
        saved, own = Positions(7, 4), Positions(tokens, length)
        with Checkpointer(tmp_path, saved, mesh=build_mesh("cpu", dp=1)) as checkpoints:
            checkpoints.save(1)
        if is_read:
            load_checkpoint(tmp_path, own, resize_vocabulary=True)
            assert torch.equal(own.head.bias[:7], saved.head.bias)
            assert torch.equal(own.tokens.weight[:7], saved.tokens.weight)
            return
        with refused(CheckpointError, "wrong-shape", "positions"):
            load_checkpoint(tmp_path, own, resize_vocabulary=True)
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(tmp_path, own)
        assert ("resize_vocabulary" in str(error.value)) == (tokens != 7)

    run_ranks(1, run)


@pytest.mark.parametrize("mesh", ["tp2", "dp2-zero3"])
def test_states_of_full_parameters_follow(tmp_path, mesh):
    """Shampoo's factor of the rows, of which each token has one, and its momentum."""
    gradients = {name: torch.ones_like(p) for name, p in llama(67).named_parameters()}

    def save(parallel):
        optimizer = parallel.optimizer(Shampoo, by_parameter=True)
        set_gradients(parallel.module, gradients)
        optimizer.step()
        with Checkpointer(tmp_path, parallel, optimizer=optimizer) as checkpoints:
            checkpoints.save(1)

    on_ranks("tp2", llama(67), save)

    def resume(parallel):
        optimizer = parallel.optimizer(Shampoo, by_parameter=True)
        with Checkpointer(tmp_path, parallel, optimizer=optimizer) as checkpoints:
            checkpoints.resume(resize_vocabulary=True)
        names = optimizer._full_steps
        return {names._name(p): {key: value.clone() for key, value in s.items()} for p, s in optimizer.state.items()}

    states = {name: state for rank in on_ranks(mesh, llama(72), resume) for name, state in rank.items()}
    for name in ENDS:
        momentum, left = states[name]["momentum"], states[name]["left"]
        assert momentum.shape[0] == 72 and momentum[:67].any() and not momentum[67:].any()
        assert left.shape == (72, 72) and left[:67, :67].any() and not left[67:].any() and not left[:, 67:].any()
