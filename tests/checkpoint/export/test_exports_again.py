"""`export_weights` plans once for a model, and again when what it has planned is no longer so."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from parallelize import build_mesh, parallelize_model
from parallelize.checkpoint.export import export_weights as exports
from tests.support.models import tiny_model
from tests.support.threads import run_ranks


@pytest.fixture
def built(monkeypatch):
    """A list that grows by one each time that a rank builds an exporter."""
    calls = []
    stock = exports.WeightExporter.__init__

    def counted(self, *args, **kwargs):
        calls.append(1)
        stock(self, *args, **kwargs)

    monkeypatch.setattr(exports.WeightExporter, "__init__", counted)
    return calls


def exported(model, **options):
    buckets = exports.export_weights(model, bucket="50KB", **options)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors.items()}


def test_a_later_call_plans_nothing_and_sees_new_values(built):
    base = tiny_model("llama")

    def body(rank):
        model = parallelize_model(deepcopy(base), build_mesh("cpu", dp=2, tp=2), zero=2)
        first = exported(model)
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(2)
        again = exported(model)
        norms = exported(model, only=lambda name: name.endswith("norm.weight"))
        assert all(torch.equal(again[name], 2 * value) for name, value in first.items())
        assert 0 < len(norms) < len(first) and all(torch.equal(norms[name], again[name]) for name in norms)
        exported(model, receive=rank > 0)  # one rank has other settings: all plan
        return exported(deepcopy(model.module)).keys() == first.keys()

    assert all(run_ranks(4, body)) and len(built) == 3 * 4


def test_what_changes_a_plan_is_seen(built):
    model = tiny_model("llama")
    first = exported(model)
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach() * 3)
    assert torch.equal(exported(model)["model.norm.weight"], 3 * first["model.norm.weight"]) and len(built) == 2
    model.register_buffer("offset", torch.ones(2))
    assert exported(model).keys() - first.keys() == {"offset"} and len(built) == 3
    assert exported(model, names="model", dtype=torch.bfloat16)["offset"].dtype is torch.bfloat16
    copy = pickle.loads(pickle.dumps(model))
    assert exported(copy).keys() == exported(model).keys() and len(built) == 5


def test_the_config_of_a_model_is_seen(built):
    model = tiny_model("llama")
    exported(model)
    model.config.rope_theta_of_a_user = 1.0
    exported(model)
    assert len(built) == 2
