"""Optimizers whose update needs a full parameter step as on the unsharded model, each parameter on one rank."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from parallelize import build_mesh, parallelize_model
from parallelize.base.errors import ModelError
from parallelize.comm.groups import Group
from tests.state.optimizers import muon_jobs as jobs
from tests.support.models import tiny_model
from tests.support.own_optimizers import BlockAdam, Shampoo
from tests.support.refused import refused
from tests.support.threads import run_ranks

MESHES = {
    "tp4": ({"tp": 4}, {}),
    "dp2tp2-zero1": ({"dp": 2, "tp": 2}, {"zero": 1}),
    "dp2tp2-zero3": ({"dp": 2, "tp": 2}, {"zero": 3}),
}
OWN = {"by_parameter": True}


def gradients_of(base, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in base.named_parameters()}


def on_ranks(base, mesh, cls, run, **options):
    """run(parallel, optimizer) on each of four ranks."""
    axes, keywords = MESHES[mesh]

    def body(rank):
        parallel = parallelize_model(deepcopy(base), build_mesh("cpu", **axes), **keywords)
        return run(parallel, parallel.optimizer(cls, **options))

    return run_ranks(4, body)


def stepped_alone(base, optimizer_of, steps=2):
    model = deepcopy(base)
    optimizer = optimizer_of(model)
    for seed in range(steps):
        for name, p in model.named_parameters():
            p.grad = gradients_of(base, seed)[name]
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("mesh", ["dp2tp2-zero1", *(pytest.param(m, marks=pytest.mark.sweep) for m in MESHES)])
@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.Adafactor, {}), (Shampoo, OWN), (BlockAdam, OWN)],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_the_same_gradients_give_the_same_bits(mesh, cls, options):
    base = tiny_model("llama", torch.float32)
    expected = stepped_alone(base, lambda model: cls(model.parameters()))

    def run(parallel, optimizer):
        for seed in range(2):
            jobs.set_gradients(parallel.module, gradients_of(base, seed))
            optimizer.step()
        return jobs.full_weights(parallel)

    for weights in on_ranks(base, mesh, cls, run, **options):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize("mesh", MESHES)
def test_each_state_is_on_one_rank_and_each_rank_has_its_share(mesh):
    base = tiny_model("llama", torch.float32)

    def run(parallel, optimizer):
        jobs.set_gradients(parallel.module, gradients_of(base, 0))
        optimizer.step()
        names = optimizer._full_steps
        return {
            names._name(p): sum(value.numel() for value in state.values())
            for p, state in optimizer.state.items()
            if names.is_owner(p) is not None
        }

    by_rank = on_ranks(base, mesh, Shampoo, run, **OWN)
    names = [name for rank in by_rank for name in rank]
    assert len(names) == len(set(names)), "the state of a parameter is on two ranks"
    # norms, and biases after sums, are on every rank of tp
    divided = {
        n for n, p in base.named_parameters() if mesh != "tp4" or p.ndim == 2 or ("_proj.bias" in n and ".o_" not in n)
    }
    assert set(names) == divided
    largest = max(p.numel() for p in base.parameters())
    loads = [sum(base.get_parameter(name).numel() for name in rank) for rank in by_rank]
    assert max(loads) <= sum(loads) / 4 + largest


def test_values_gradients_and_results_are_sent_once(monkeypatch):
    base, stock, sent = tiny_model("llama", torch.float32), Group.all_to_all, []

    def counted(self, x, to_each, from_each):
        sent.append(sum(x.element_size() * n for rank, n in enumerate(to_each) if rank != self.rank))
        return stock(self, x, to_each, from_each)

    monkeypatch.setattr(Group, "all_to_all", counted)

    def run(parallel, optimizer):
        jobs.set_gradients(parallel.module, gradients_of(base, 0))
        optimizer.step()

    on_ranks(base, "dp2tp2-zero3", torch.optim.Adafactor, run)
    assert len(sent) == 3 * 4, "two to the owners and one back, on each of four ranks"
    assert 0 < sum(sent) <= 3 * 4 * sum(p.numel() for p in base.parameters())


class Replacing(torch.optim.Optimizer):
    """One that puts other tensors in the place of values, and counts its steps beside the states of parameters."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p - group["lr"] / self.state["steps"] * p.grad / p.grad.norm()


def test_values_that_are_replaced_and_state_of_no_parameter():
    base = tiny_model("llama", torch.float32)
    expected = stepped_alone(base, lambda model: Replacing(model.parameters()))

    def run(parallel, optimizer):
        for seed in range(2):
            jobs.set_gradients(parallel.module, gradients_of(base, seed))
            optimizer.step()
        return jobs.full_weights(parallel), optimizer.state["steps"]

    for weights, steps in on_ranks(base, "tp4", Replacing, run, **OWN):
        assert steps == 2
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_groups_that_are_added_and_parameters_without_gradients():
    base = tiny_model("llama", torch.float32)
    added, idle = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    expected = stepped_alone(base, lambda model: Shampoo(p for n, p in model.named_parameters() if n != idle))

    def run(parallel, optimizer):
        parameters = dict(parallel.module.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [
                p for p in group["params"] if optimizer._full_steps is not None and p is not parameters[added]
            ]
        optimizer.add_param_group({"params": [parameters[added]]})
        for seed in range(2):
            jobs.set_gradients(parallel.module, gradients_of(base, seed))
            parameters[idle].grad = None
            optimizer.step()
        return jobs.full_weights(parallel)

    for weights in on_ranks(base, "tp4", Shampoo, run, **OWN):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize("mesh", ["dp2tp2-zero1"])
def test_state_in_host_memory_gives_the_same_steps(mesh):
    base = tiny_model("llama", torch.float32)

    def run(parallel, optimizer):
        jobs.set_gradients(parallel.module, gradients_of(base, 0))
        optimizer.step(lambda: None)
        return jobs.full_weights(parallel)

    plain, offloaded = (on_ranks(base, mesh, Shampoo, run, **OWN, **how) for how in ({}, {"offload_state": True}))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(plain, offloaded, strict=True) for name in a)


def test_functions_of_pytorch_for_states_of_every_rank_are_refused():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    def run(parallel, optimizer):
        with refused(ModelError, "state-on-owner", "Shampoo", "Checkpointer"):
            get_optimizer_state_dict(parallel.module, optimizer)
        return True

    assert on_ranks(tiny_model("llama"), "tp4", Shampoo, run, **OWN) == [True] * 4


def test_parameters_of_others_are_refused():
    def run(parallel, optimizer):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 5))]})
        with refused(ModelError, "foreign-parameter", "[3, 5]"):
            optimizer.step()
        return True

    assert on_ranks(tiny_model("llama"), "tp4", Shampoo, run, **OWN) == [True] * 4


def test_a_model_whose_parameters_every_rank_has_is_stepped_as_before():
    def body(rank):
        parallel = parallelize_model(nn.Linear(3, 2), build_mesh("cpu", dp=1))
        return getattr(parallel.optimizer(Shampoo), "_full_steps", None)

    assert run_ranks(1, body) == [None]
