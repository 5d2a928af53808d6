"""What losses refuse by name: weights sharded over data axes, label smoothing outside of 0 to 1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from parallelize import (
    ShapeError,
    build_mesh,
    cross_entropy,
    linear_cross_entropy,
    linear_token_log_probs,
    token_log_probs,
)
from parallelize.axes.vocabulary.logits.sharded_logits import mark
from parallelize.comm.groups import Group
from parallelize.ops.vocabulary.class_targets import Vocabulary
from tests.axes.vocabulary.small_head import HIDDEN, TOKENS, VOCAB, alone, slug_of
from tests.support.threads import run_ranks


@pytest.mark.parametrize("axis", ["dp", "dp_shard", "cp"])
def test_a_weight_sharded_over_a_data_axis_is_no_vocabulary_shard(axis):
    def body(rank):
        mesh = build_mesh("cpu", **{axis: 2})
        head = nn.Linear(HIDDEN, 10, bias=False)
        hidden, targets = torch.randn(TOKENS, HIDDEN), torch.randint(0, 10, (TOKENS,))
        if axis == "dp":
            fully_shard(head, mesh=mesh)
            weight = head.weight
        else:
            weight = DTensor.from_local(head.weight.detach()[:5], mesh, [Shard(0)], run_check=False)
        logits = DTensor.from_local(torch.randn(TOKENS, 5), mesh, [Shard(-1)], run_check=False)
        assert slug_of(ShapeError, lambda: linear_cross_entropy(hidden, weight, targets)) == "bad-head"
        assert slug_of(ShapeError, lambda: linear_token_log_probs(hidden, weight, targets)) == "bad-head"
        for call in (cross_entropy, token_log_probs):
            assert slug_of(ShapeError, lambda call=call: call(logits, targets)) == "bad-logits"

    run_ranks(2, body)


@pytest.mark.parametrize("smoothing", [-0.1, 1.5, float("nan")])
def test_label_smoothing_is_from_0_to_1(smoothing):
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    targets = torch.zeros(TOKENS, dtype=torch.long)
    marked = mark(F.linear(hidden, weight), Vocabulary(VOCAB, Group.alone()))
    for call in (
        lambda: linear_cross_entropy(hidden, weight, targets, label_smoothing=smoothing),
        lambda: cross_entropy(F.linear(hidden, weight), targets, label_smoothing=smoothing),
        lambda: F.cross_entropy(marked, targets, label_smoothing=smoothing),
        lambda: F.cross_entropy(alone(hidden, weight), targets, label_smoothing=smoothing),
    ):
        assert slug_of(ShapeError, call) == "bad-label-smoothing"
