"""Some names, shards of a rank, and only what has changed."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from parallelize import build_mesh, parallelize_model
from parallelize.checkpoint.export.export_weights import WeightExporter
from tests.support.models import tiny_model
from tests.support.threads import run_ranks


@pytest.fixture(scope="module")
def base():
    return tiny_model("mixtral")


def names_of(buckets):
    return [metadata.name for bucket in buckets for metadata in bucket.metadata]


def on_mesh(base, body, **axes):
    def run(rank):
        model = parallelize_model(deepcopy(base), build_mesh("cpu", **axes), zero=1 if "dp" in axes else 0)
        return body(rank, model)

    return run_ranks(4, run)


def test_shards_of_all_ranks_cover_each_tensor_once(base):
    def body(rank, model):
        exporter = WeightExporter(model)
        parts = [(s.name, s.box, s.tensor.clone()) for s in exporter.shards()]
        full = {n: t.clone() for b in exporter.export() for n, t in b.tensors.items()}
        return parts, full

    results = on_mesh(base, body, dp=2, tp=2)
    full = results[0][1]
    rebuilt = {name: torch.full_like(value, torch.nan) for name, value in full.items()}
    elements = 0
    for parts, _ in results:
        for name, box, value in parts:
            rebuilt[name][tuple(slice(*side) for side in box)] = value
            elements += value.numel()
    assert elements == sum(value.numel() for value in full.values())
    assert all(torch.equal(rebuilt[name], value) for name, value in full.items())


def test_only_names_and_only_changes_are_exported(base):
    def body(rank, model):
        exporter = WeightExporter(model, bucket="20KB")
        counts = [len(names_of(exporter.export(changed=True)))]
        counts.append(len(names_of(exporter.export(changed=True))))
        with torch.no_grad():  # one expert of a stacked weight, in a way that no counter of versions sees
            for name, parameter in model.module.named_parameters():
                if name == "model.layers.1.input_layernorm.weight":
                    getattr(parameter, "_local_tensor", parameter).data.mul_(2)
        stopped = exporter.export(changed=True)
        next(stopped)
        stopped.close()
        changed = names_of(exporter.export(changed=True))
        return counts, changed, names_of(exporter.export(only=lambda name: name.endswith("norm.weight")))

    total = len(names_of(WeightExporter(deepcopy(base)).export()))
    for counts, changed, norms in on_mesh(base, body, dp=2, tp=2):
        assert counts == [total, 0] and changed == ["model.layers.1.input_layernorm.weight"]
        assert len(norms) == 5
