"""The errors of exports."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from parallelize import build_mesh, parallelize_model
from parallelize.base.errors import CheckpointError
from parallelize.checkpoint.export.export_weights import WeightExporter, export_weights
from tests.support.models import tiny_model
from tests.support.refused import Block, refused
from tests.support.threads import run_ranks


@pytest.mark.parametrize(
    ("slug", "options"),
    [
        ("bad-size", {"bucket": "large"}),
        ("unknown-names", {"names": "hub"}),
        ("unsavable-dtype", {"dtype": torch.int32}),
    ],
)
def test_arguments_are_checked(slug, options):
    with refused(CheckpointError, slug):
        export_weights(Block(), **options)


def test_models_without_weights_are_refused():
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with refused(CheckpointError, "no-weights"):
        export_weights(model)


def test_buckets_are_released():
    buckets = export_weights(Block(), bucket=64)
    first = next(buckets)
    kept = first.tensors["up.weight"]
    next(buckets)
    with refused(CheckpointError, "bucket-released", "bucket 0"):
        assert first.tensors
    assert kept.shape == (12, 8)


def test_an_exporter_of_another_layout_is_stale():
    model = Block()
    exporter = WeightExporter(model)
    model.up = nn.Linear(8, 13)
    with refused(CheckpointError, "stale-exporter"):
        exporter.export()


def test_ranks_that_export_other_tensors_are_refused_on_all_ranks():
    base = tiny_model("llama")

    def body(rank):
        model = parallelize_model(deepcopy(base), build_mesh("cpu", tp=2))
        with refused(CheckpointError, "export-differs", "rank 1"):
            export_weights(model, bucket=1000 + rank)
        with refused(CheckpointError, "export-differs", "rank 1"):
            export_weights(model, only=lambda name: rank == 0 or "norm" in name)
        return True

    assert run_ranks(2, body) == [True, True]
