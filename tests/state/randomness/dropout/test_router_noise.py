"""Routers that draw noise in training choose the same experts on any mesh: losses and gradients of two steps equal one
process's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.axes.context.test_dropout_over_cp import check
from tests.support.models import tiny_model

MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {"sequence_parallel": True}),
    ({"tp": 2}, {}),
    ({"dp": 2}, {"ep": 2, "zero": 1, "recompute": "full"}),
    ({"cp": 2}, {"ep": 2}),
    ({"cp": 2, "tp": 2}, {"sequence_parallel": True, "ep": 4}),
    ({"pp": 2, "dp": 2}, {"num_microbatches": 2}),
    ({"tp": 4}, {"sequence_parallel": True, "recompute": "full"}),
]


@pytest.mark.variants(every=8)
@pytest.mark.parametrize(("sizes", "options"), MESHES, ids=str)
@pytest.mark.parametrize("family", ["phimoe", "mixtral"])
def test_equals_one_process(family, sizes, options):
    more = {"router_jitter_noise": 0.1} if family == "mixtral" else {}
    model = tiny_model(family, torch.float64, **more).train()
    check(model, sizes, batch=4, **options)
