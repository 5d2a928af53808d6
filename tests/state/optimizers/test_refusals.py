"""Optimizers that would step another model in silence are refused by name."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from parallelize import Muon, build_mesh, build_optimizer, parallelize_model, parallelize_module
from parallelize.base.errors import ModelError
from tests.state.optimizers.muon_jobs import full_weights, set_gradients
from tests.support.models import tiny_model
from tests.support.own_optimizers import Shampoo
from tests.support.refused import RULES, Block, refused, small_mesh
from tests.support.threads import run_ranks


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


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, Shampoo])
def test_optimizers_that_are_not_known_are_refused_on_shards(cls):
    with small_mesh(tp=2) as mesh:
        model = parallelize_module(Block(), mesh, RULES)
        with refused(ModelError, "not-elementwise", cls.__name__):
            build_optimizer(model, cls)


def test_so_are_they_where_only_experts_are_shards():
    """Without tp and at ZeRO 0, dense parameters are full, and experts over the data ranks are not."""
    base = tiny_model("mixtral")

    def body(rank):
        parallel = parallelize_model(deepcopy(base), build_mesh("cpu", dp=2), zero=0, ep=2)
        with refused(ModelError, "not-elementwise", "Shampoo", "by_parameter=True"):
            parallel.optimizer(Shampoo)
        return True

    assert run_ranks(2, body) == [True, True]


def test_what_an_optimizer_needs_is_said_once():
    with small_mesh(tp=2) as mesh:
        model = parallelize_module(Block(), mesh, RULES)
        with refused(ModelError, "not-elementwise", "not both"):
            build_optimizer(model, Shampoo, elementwise=True, by_parameter=True)
        with refused(ModelError, "not-elementwise", "LBFGS"):
            build_optimizer(model, torch.optim.LBFGS, by_parameter=True)
        for cls in (torch.optim.Adafactor, torch.optim.Muon):
            with refused(ModelError, "not-elementwise", "needs full parameters"):
                build_optimizer(model, cls, elementwise=True)
        with refused(ModelError, "no-optimizer-class", "AdamW", "lr="):
            build_optimizer(model, torch.optim.AdamW(model.parameters()))


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


class Cubed(torch.optim.Optimizer):
    """Of products of full matrices, without a state."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad @ p.grad.T @ p.grad, alpha=group["lr"])


@pytest.mark.sweep
@pytest.mark.parametrize("cls", [torch.optim.Muon, Cubed])
def test_stock_classes_on_dtensors_see_full_matrices(cls):
    """Not by `build_optimizer`: PyTorch's rules for DTensors gather what an operation needs, packed weights among
    them."""
    base = tiny_model("phi3", torch.float64)
    generator = torch.Generator().manual_seed(1)
    gradients = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in base.named_parameters()}
    reference = deepcopy(base)
    for name, parameter in reference.named_parameters():
        parameter.grad = gradients[name]
    cls([p for p in reference.parameters() if p.ndim == 2], lr=0.1).step()

    def body(rank):
        model = parallelize_module(deepcopy(base), build_mesh("cpu", tp=2))
        set_gradients(model, gradients)
        cls([p for p in model.parameters() if p.ndim == 2], lr=0.1).step()
        return full_weights(model)

    tolerance = 1e-12 if cls is Cubed else 5e-3  # norms of shards are summed in bfloat16
    for weights in run_ranks(2, body):
        for name, value in reference.named_parameters():
            assert (weights[name] - value).abs().max() <= tolerance, name
