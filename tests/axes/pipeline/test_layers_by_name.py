"""Layers of an `nn.ModuleDict` are cut into stages as those of a list are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallelize import PlanError, build_mesh, next_tokens, parallelize_model
from parallelize.plan.model_facts import describe
from parallelize.plan.stages import cut_stages
from tests.support.parity import worst
from tests.support.threads import run_ranks


class Named(nn.Module):
    """Three layers by name."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("first", "second", "third")})
        self.head = nn.Linear(8, 20)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers.values():
            x = x + layer(x).relu()
        return self.head(x)


def test_a_step_over_stages_equals_the_unsharded_one():
    torch.manual_seed(0)
    model, ids = Named().double(), torch.randint(0, 20, (4, 5))
    stages, targets = [copy.deepcopy(model) for _ in range(2)], next_tokens(ids)
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    def body(rank):
        parallel = parallelize_model(stages[rank], build_mesh("cpu", pp=2))
        step = parallel.step(ids, targets=targets)
        grads = {name: p.grad for name, p in parallel.module.named_parameters() if p.grad is not None}
        return step, grads

    results = run_ranks(2, body)
    actual = {name: grad for _, grads in results for name, grad in grads.items()}
    assert actual.keys() == expected.keys() and worst(actual, expected)[0] < 1e-12
    assert all(torch.allclose(step, loss, rtol=1e-12) for step, _ in results)


def test_a_dict_of_different_modules_is_no_list_of_layers():
    parts = nn.ModuleDict({"image": nn.Linear(4, 4), "text": nn.Embedding(4, 4)})
    with pytest.raises(PlanError, match="no-layers"):
        cut_stages(None, describe(nn.ModuleDict({"parts": parts, "head": nn.Linear(4, 4)})), 2)
