"""A step that is like the one before does not look at the model again: nothing is described, no pattern is matched."""

from __future__ import annotations

import copy
import sys
import threading
from collections import Counter
from collections.abc import Callable
from math import prod
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from parallelize import build_mesh, parallelize_model
from parallelize.plan.model_facts import describe
from parallelize.plan.pattern import matches
from parallelize.plan.resolve import resolve
from parallelize.plan.tensor_rows import tensor_rows
from parallelize.state.later_changes import when_changed
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks

IDS, LABELS = tiny_batch(50)
_INSTALLING = threading.Lock()  # ranks are threads, and Python refuses to install two profile functions at once
DECIDE = {function.__code__: function.__name__ for function in (describe, matches, resolve, tensor_rows)}


def decisions_of(run: Callable[[], Any]) -> Counter:
    """How often each function that decides about a model is called."""
    counts: Counter = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in DECIDE:
            counts[DECIDE[frame.f_code]] += 1

    with _INSTALLING:
        sys.setprofile(count)
    try:
        run()
    finally:
        with _INSTALLING:
            sys.setprofile(None)
    return counts


@pytest.mark.variants(every=1)
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"tp": 2}, {"sequence_parallel": True, "loss_parallel": True}),
        ({"dp": 2, "tp": 2}, {"zero": 2}),
        ({"pp": 2, "tp": 2}, {"num_microbatches": 2}),
        ({"cp": 2}, {}),
        ({"dp": 2}, {"zero": 3}),
    ],
    ids=str,
)
def test_a_steady_step_decides_nothing(axes, options):
    models = [tiny_model("llama", torch.float64) for _ in range(prod(axes.values()))]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", **axes), **options)
        optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)

        def train() -> None:
            parallel.step(input_ids=IDS, targets=LABELS)
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            train()
        return dict(decisions_of(train))

    assert run_ranks(len(models), body) == [{}] * len(models)


def test_a_step_after_a_change_decides():
    """What the other test counts is there to be counted."""
    models = [copy.deepcopy(tiny_model("llama", torch.float64)) for _ in range(2)]

    def body(rank):
        parallel = parallelize_model(models[rank], build_mesh("cpu", tp=2))
        parallel.step(input_ids=IDS, targets=LABELS)
        parallel.module.lm_head = nn.Linear(parallel.module.config.hidden_size, 50, bias=False, dtype=torch.float64)
        return decisions_of(lambda: parallel.step(input_ids=IDS, targets=LABELS))

    for counts in run_ranks(2, body):
        assert counts["describe"] and counts["matches"] and counts["tensor_rows"]


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential])
def test_an_inserted_layer_is_seen(kind):
    """`insert` registers no module."""
    layers, changes = kind(*([[nn.Linear(2, 2)]] if kind is nn.ModuleList else [nn.Linear(2, 2)])), []
    when_changed(layers, lambda: changes.append(1))
    layers.insert(0, nn.Linear(2, 2))
    assert changes == [1]
    assert len(layers) == 2
