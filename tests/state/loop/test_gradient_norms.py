"""Gradient norms count each element once, and do not overflow."""

from __future__ import annotations

import torch
from torch import nn

from parallelize import build_mesh, clip_grad_norm_, parallelize_module
from tests.axes.tensor.planned_pairs import planned
from tests.axes.tensor.test_hot_path import pair, step
from tests.support.threads import run_ranks


def test_half_precision_norms_do_not_overflow():
    parameters = [nn.Parameter(torch.zeros(8, 8, dtype=torch.float16)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 100.0)
    assert abs(clip_grad_norm_(parameters, 1.0) - 1131.4) < 1
    assert parameters[0].grad[0, 0] > 0.08


def test_norms_count_shared_heads_once_through_wrappers_and_moves():
    model, models = pair("llama", num_key_value_heads=1)
    step(model)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])

    def body(rank):
        net = planned(models, rank)
        net.float()
        net.double()
        step(net)
        wrapper = nn.ModuleDict({"inside": net})
        return [clip_grad_norm_(wrapper, 1e9), clip_grad_norm_(net, 1e9), clip_grad_norm_(net.parameters(), 1e9)]

    for norms in run_ranks(2, body):
        assert all(abs(norm - expected) < 1e-6 * expected for norm in norms), (norms, expected)


def test_infinity_norm_of_an_empty_shard():
    models = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)) for _ in range(4)]

    def body(rank):
        net = parallelize_module(models[rank], build_mesh("cpu", tp=4), {"0": "colwise", "1": "rowwise"})
        net(torch.ones(1, 2)).sum().backward()
        return clip_grad_norm_(net, 1.0, float("inf"))

    assert len({float(norm) for norm in run_ranks(4, body)}) == 1
