"""Planned copies of a tiny model on two ranks, with sequence and loss parallelism."""

from __future__ import annotations

from parallelize import build_mesh, parallelize_module
from tests.axes.tensor.test_hot_path import BOTH


def planned(models, rank, **options):
    return parallelize_module(models[rank], build_mesh("cpu", tp=2), **{**BOTH, **options})
