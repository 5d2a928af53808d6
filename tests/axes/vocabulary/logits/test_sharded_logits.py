"""Sharded logits work in the code of tutorials."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from parallelize import ModelError, build_mesh, parallelize_module
from tests.axes.tensor.test_hot_path import BOTH, pair
from tests.support.models import tiny_batch
from tests.support.threads import run_ranks


def test_the_tutorial_flatten_works_on_sharded_logits():
    model, models = pair("llama")
    ids, labels = tiny_batch()
    expected = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())

    def body(rank):
        parallelize_module(models[rank], build_mesh("cpu", tp=2), **BOTH)
        logits = models[rank](input_ids=ids).logits
        with pytest.raises(ModelError):
            logits.flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).detach()

    for actual in run_ranks(2, body):
        assert abs(actual - expected) < 1e-12
