"""Tensors that tests make are on the device of their rank; those of the package are where it puts them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallelize.base.layout import even_interval
from tests.support import device


@pytest.fixture
def on_meta(monkeypatch):
    """This process as a rank whose device is the meta device, which every machine has."""
    monkeypatch.setattr(device, "_of_this_rank", torch.device("meta"))
    monkeypatch.setattr(device, "CHOSEN", "meta")
    for name in device.FACTORIES.split():
        monkeypatch.setattr(torch, name, device._placing(getattr(torch, name)))


def test_tensors_and_layers_of_tests(on_meta):
    generator = torch.Generator().manual_seed(0)
    assert torch.randn(3, generator=generator, requires_grad=True).is_meta
    assert torch.randn(3, requires_grad=True).requires_grad and torch.tensor([1.0]).is_meta
    assert nn.Linear(2, 2).weight.is_meta
    assert torch.ones(2, device="cpu").device.type == "cpu"


def test_tensors_of_the_package_stay(on_meta):
    made = {}
    code = "import torch\nmade['here'] = torch.ones(2)\n"
    exec(compile(code, even_interval.__code__.co_filename, "exec"), {"made": made})
    assert made["here"].device.type == "cpu"


def test_what_jobs_get_and_send(on_meta):
    placed = device.placed({"x": torch.ones(2, device="cpu"), "model": nn.Linear(1, 1, device="cpu"), "n": 1})
    assert placed["x"].is_meta and placed["model"].weight.is_meta and placed["n"] == 1
    sent = device.on_cpu([torch.ones(1, device="cpu"), "text"])
    assert sent[0].device.type == "cpu" and sent[1] == "text"
