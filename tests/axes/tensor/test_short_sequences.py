"""Sequence parallelism with one token per rank."""

from __future__ import annotations

import pytest
import torch

from parallelize.axes.tensor.watch.shard_dims import ShardDim
from tests.axes.tensor.experts.test_expert_tensor_parallel import gradients
from tests.support.models import tiny_batch, tiny_model
from tests.support.parity import worst


@pytest.mark.parametrize(
    ("dim", "before", "after", "expected"),
    [
        (-2, (3, 1, 8), (3, 8), (-2, 3)),
        (-2, (3, 8), (3, 1, 8), (-2, 1)),
        (-2, (3, 1, 8), (3, 1, 2, 4), (-3, 1)),
        (-2, (1, 1, 8), (1, 8), (-2, 1)),
        (-2, (1, 1, 8), (1, 1, 2, 4), (-3, 1)),
        (-2, (3, 1, 8), (6, 4), None),
    ],
)
def test_a_view_of_one_token_of_each_sequence(dim, before, after, expected):
    """The dim of tokens becomes none of features, of which a linear would seem to need all tokens."""
    outer = 3 if before == (3, 8) else 1
    shard = ShardDim("sequence", dim, outer, 1, "").viewed(before, after)
    assert (shard and (shard.dim, shard.outer)) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((5, 24), (5, 3, 1, 8), (-2, 1)),
        ((5, 24), (1, 5, 3, 1, 8), (-2, 1)),
        ((5, 24), (5, 3, 1, 1, 8), None),  # one of two dims
        ((5, 24), (5, 3, 8), (-2, 3)),
    ],
)
def test_a_view_of_a_packed_weight_with_one_head_on_a_rank(before, after, expected):
    """The dim of the head, and not that of query, key and value beside it."""
    shard = ShardDim("features", -1, 3, 1, "").viewed(before, after)
    assert (shard and (shard.dim, shard.outer)) == expected


def test_a_linear_on_flattened_tokens_beside_a_router():
    """Of qwen2_moe's shared experts, with one token of each sequence on a rank."""
    ids, labels = tiny_batch(batch=3, length=2)
    expected, results = gradients(tiny_model("qwen2_moe", torch.float64), ids, labels, sequence_parallel=True)
    for actual in results:
        assert worst(actual, expected)[0] <= 1e-12
