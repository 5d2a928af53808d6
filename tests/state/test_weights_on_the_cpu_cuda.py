"""Weights stay on the CPU until they are moved, also where the mesh is of GPUs: all of them, or none."""

from __future__ import annotations

import pytest
import torch

from parallelize import build_mesh, parallelize_module
from tests.support.models import tiny_model
from tests.support.processes import Pool

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def devices(rank: int) -> tuple[set[str], set[str]]:
    model = tiny_model("llama").cpu()
    parallelize_module(model, build_mesh("cuda", tp=2))
    before = {parameter.to_local().device.type for parameter in model.parameters()}
    model.cuda()
    return before, {parameter.to_local().device.type for parameter in model.parameters()}


def test_all_weights_are_on_one_device(monkeypatch):
    monkeypatch.setenv("PARALLELIZE_TEST_DEVICE", "cuda")
    pool = Pool(2)
    try:
        for before, after in pool.run(devices):
            assert before == {"cpu"} and after == {"cuda"}
    finally:
        pool.close()
