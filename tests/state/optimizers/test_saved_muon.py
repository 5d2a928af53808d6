"""Muon's state is saved on one mesh and loaded on another, and `rebuild` builds it again."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from parallelize import Checkpointer, Muon, build_mesh, parallelize_model, rebuild
from tests.state.optimizers import muon_jobs as jobs
from tests.support.models import tiny_model
from tests.support.threads import run_ranks


@pytest.mark.sweep
@pytest.mark.parametrize("builds_again", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_a_run_goes_on_on_another_mesh(tmp_path, builds_again):
    base = tiny_model("gpt2", torch.float64)
    reference = jobs.Reference(base)
    for ids, labels in (*jobs.batches(), *jobs.batches()):
        reference.step(ids, labels)

    def first(rank):
        parallel = parallelize_model(deepcopy(base), build_mesh("cpu", dp=2, tp=2), zero=1)
        optimizer = parallel.optimizer(Muon, **jobs.SETTINGS, **jobs.ADAM)
        jobs.train(parallel, optimizer)
        with Checkpointer(tmp_path, parallel, optimizer=optimizer) as checkpoints:
            checkpoints.save(3)

    def second(rank):
        parallel = parallelize_model(deepcopy(base), build_mesh("cpu", dp=4), zero=3)
        if builds_again:
            optimizer = next(iter(rebuild(parallel, tmp_path).optimizers.values()))
        else:
            optimizer = parallel.optimizer(Muon, **jobs.SETTINGS, **jobs.ADAM)
            with Checkpointer(tmp_path, parallel, optimizer=optimizer) as checkpoints:
                assert checkpoints.resume() == 3
        jobs.train(parallel, optimizer)
        return jobs.full_weights(parallel)

    run_ranks(4, first)
    for weights in run_ranks(4, second):
        for name, value in reference.weights().items():
            assert (weights[name] - value).abs().max() <= 1e-12 * value.abs().max(), name
