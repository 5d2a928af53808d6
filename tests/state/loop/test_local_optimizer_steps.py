"""A local optimizer trains with closures and schedulers, and a failed step restores everything."""

from __future__ import annotations

import pytest
import torch

from parallelize import ModelError, full_parameter, local_optimizer
from tests.axes.tensor.planned_pairs import planned
from tests.axes.tensor.test_hot_path import pair, step
from tests.support.parity import worst
from tests.support.threads import run_ranks


def test_an_optimizer_step_with_a_closure_trains():
    model, models = pair()
    plain = torch.optim.SGD(model.parameters(), 0.1)

    def closure(net, optimizer):
        def run():
            optimizer.zero_grad()
            return step(net)

        return run

    for _ in range(2):
        plain.step(closure(model, plain))

    def body(rank):
        net = planned(models, rank)
        optimizer = local_optimizer(torch.optim.SGD(net.parameters(), 0.1))
        for _ in range(2):
            assert optimizer.step(closure(net, optimizer)) > 0
        return {name: full_parameter(net, name).detach() for name, _ in net.named_parameters()}

    for actual in run_ranks(2, body):
        assert worst(actual, {n: p.detach() for n, p in model.named_parameters()})[0] < 1e-12


def test_a_failed_optimizer_step_restores_everything():
    _, models = pair()

    def body(rank):
        net = planned(models, rank)
        optimizer = local_optimizer(torch.optim.AdamW(net.parameters(), 0.1))
        step(net)
        optimizer.param_groups[0]["betas"] = "nonsense"
        with pytest.raises((ValueError, TypeError)):
            optimizer.step()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], net.parameters(), strict=True))
        optimizer.zero_grad()
        assert all(p.grad is None for p in net.parameters())
        with pytest.raises(ModelError) as error:
            local_optimizer(optimizer)
        assert error.value.slugs == ("already-local",)

    run_ranks(2, body)


def test_schedulers_work_on_a_local_optimizer():
    _, models = pair()

    def body(rank):
        net = planned(models, rank)
        optimizer = local_optimizer(torch.optim.SGD(net.parameters(), 0.1))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        step(net)
        optimizer.step()
        schedule.step()
        return optimizer.param_groups[0]["lr"]

    assert run_ranks(2, body) == [0.05, 0.05]
