"""Stock models on `cp` equal the same models alone: loss, every gradient, the optimiser's step."""

from __future__ import annotations

import pytest
import torch

from tests.support.context import alone, batch_of, error_of, family, on_mesh
from tests.support.models import FAMILIES
from tests.support.threads import run_ranks

LENGTH = 13


def check(model, sizes, limit=1e-12, length=LENGTH, inputs=None, rows=2, **options):
    ids, targets = batch_of(length, rows)
    inputs = inputs or {}
    want = alone(model, ids, targets, **inputs)
    world = torch.tensor(list(sizes.values())).prod().item()
    for found in run_ranks(world, lambda rank: on_mesh(model, sizes, ids, targets, inputs, **options)):
        error, name = error_of(found, want)
        assert error <= limit, name


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, ulysses):
    check(family(name), {"cp": 2}, ulysses=ulysses)


@pytest.mark.parametrize("ulysses", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_four_ranks(name, ulysses):
    check(family(name), {"cp": 4}, ulysses=ulysses)
