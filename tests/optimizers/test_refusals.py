"""Optimizers that would step another model in silence are refused by name."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from parallelize import Muon, build_mesh, build_optimizer, parallelize_model, parallelize_module
from parallelize.errors import ModelError
from tests.support.models import tiny_model
from tests.support.refused import RULES, Block, refused, small_mesh
from tests.support.threads import run_ranks


class Shampoo(torch.optim.Optimizer):
    """Preconditions each matrix from both sides: what SOAP and Shampoo have in common."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim == 2:
                    left, right = torch.linalg.eigh(p.grad @ p.grad.T)[1], torch.linalg.eigh(p.grad.T @ p.grad)[1]
                    p.sub_(left @ (left.T @ p.grad @ right).sign() @ right.T, alpha=group["lr"])


def test_options_of_muon_are_checked():
    model = Block()
    for options in ({"lr": -1.0}, {"momentum": -0.5}, {"adjust_lr_fn": "none"}, {"split": {"*": "rows"}}):
        with refused(ModelError, "bad-muon-option"):
            build_optimizer(model, Muon, **options)
    with refused(ModelError, "no-chunks", "up.weight"):
        build_optimizer(model, Muon, split={"up*": "heads"})


def test_muon_without_its_model_does_not_step():
    model = Block()
    optimizer = Muon(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    with refused(ModelError, "unbound-optimizer"):
        optimizer.step()


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, Shampoo])
def test_optimizers_of_full_matrices_are_refused_on_shards(cls):
    with small_mesh(tp=2) as mesh:
        model = parallelize_module(Block(), mesh, RULES)
        with refused(ModelError, "not-elementwise", cls.__name__):
            build_optimizer(model, cls)


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, Shampoo])
def test_so_are_they_where_only_experts_are_shards(cls):
    """Without tp and at ZeRO 0, dense parameters are full, and experts over the data ranks are not."""
    base = tiny_model("mixtral")

    def body(rank):
        parallel = parallelize_model(deepcopy(base), build_mesh("cpu", dp=2), zero=0, ep=2)
        with refused(ModelError, "not-elementwise", cls.__name__):
            parallel.optimizer(cls)
        return True

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, Shampoo])
def test_they_step_full_parameters_as_the_unsharded_model(cls):
    base = Block()

    def stepped(model, optimizer):
        for seed in range(2):
            optimizer.zero_grad()
            for number, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(10 * seed + number)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    reference = deepcopy(base)
    expected = stepped(reference, cls(reference.parameters()))
    model = deepcopy(base)
    assert all(map(torch.equal, stepped(model, build_optimizer(model, cls)), expected))
