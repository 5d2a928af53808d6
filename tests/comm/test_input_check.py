"""Ranks of one tp group that are given other batches are named in the first forward, and in every n-th after it."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from parallelize import (
    HandshakeError,
    build_mesh,
    cross_entropy,
    parallelize_model,
    parallelize_module,
    token_log_probs,
)
from parallelize.comm import handshake as input_check
from tests.support.models import tiny_batch, tiny_model
from tests.support.threads import run_ranks


def differs(call) -> bool:
    try:
        call()
    except HandshakeError as error:
        assert error.slugs == ("replicas-differ",)
        return True
    return False


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("check_replicated", "expected"), [(None, [True, False]), (True, [True] * 2), (False, [False] * 2)]
)
def test_other_inputs_on_a_rank_are_named(training, check_replicated, expected):
    models = [tiny_model("llama") for _ in range(2)]

    def body(rank: int) -> list[bool]:
        model = parallelize_module(models[rank], build_mesh("cpu", tp=2), check_replicated=check_replicated)
        ids, _ = tiny_batch(seed=rank)
        model.train(training)
        return [differs(lambda: model(input_ids=ids)) for _ in range(2)]

    assert run_ranks(2, body) == [expected] * 2


def test_training_and_evaluation_are_counted_by_themselves():
    models = [tiny_model("llama") for _ in range(2)]

    def body(rank: int) -> list[bool]:
        model = parallelize_model(models[rank], build_mesh("cpu", tp=2), compare_every=3).module
        same, _ = tiny_batch(seed=5)
        other, _ = tiny_batch(seed=rank)
        outcomes = []
        for training, number in [(True, 0), (False, 0), (True, 1), (True, 2), (True, 3), (False, 1)]:
            ids = same if number == 0 else other
            outcomes.append(differs(lambda: model.train(training)(input_ids=ids)))  # noqa: B023
        return outcomes

    assert run_ranks(2, body) == [[False, False, False, False, True, False]] * 2


def test_a_step_compares_by_its_own_message_and_a_copy_counts_by_itself():
    models = [tiny_model("llama") for _ in range(2)]
    calls: list[int] = []

    def body(rank: int) -> int:
        parallel = parallelize_model(models[rank], build_mesh("cpu", tp=2))
        ids, labels = tiny_batch()
        before = len(calls)
        parallel.step(ids, targets=labels)
        after_step = len(calls)
        clone = copy.deepcopy(parallel.module)
        for model in (parallel.module, clone):
            model(input_ids=ids)
        return after_step - before

    with mock.patch.object(input_check, "check_replicas", lambda *args, **kwargs: calls.append(1)):
        assert run_ranks(2, body) == [0, 0]
    assert len(calls) == 4


def test_what_is_no_tensor_is_not_compared():
    models = [tiny_model("llama") for _ in range(2)]

    def body(rank: int) -> bool:
        model = parallelize_module(models[rank], build_mesh("cpu", tp=2))
        ids, _ = tiny_batch()
        return bool(torch.isfinite(model(input_ids=ids, use_cache=False, logits_to_keep=1).logits).all())

    assert all(run_ranks(2, body))


@pytest.mark.parametrize("fuse_loss", [False, True])
@pytest.mark.parametrize("loss", ["ours", "stock", "log probs"])
def test_other_targets_on_a_rank_are_named(loss, fuse_loss):
    models = [tiny_model("llama") for _ in range(2)]
    losses = {
        "ours": cross_entropy,
        "stock": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        "log probs": lambda logits, targets: token_log_probs(logits, targets).sum(),
    }

    def body(rank: int) -> list[bool]:
        options = {"loss_parallel": True, "fuse_loss": fuse_loss}
        model = parallelize_module(models[rank], build_mesh("cpu", tp=2), **options)
        ids, labels = tiny_batch()
        other = labels.clamp(min=0) if rank else labels.clamp(min=0).flip(0, 1)
        return [differs(lambda: losses[loss](model(input_ids=ids).logits, other)) for _ in range(2)]

    assert run_ranks(2, body) == [[True, False]] * 2
