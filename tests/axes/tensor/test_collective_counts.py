"""Exact collectives of one layer, and buffers no larger than a shard."""

from __future__ import annotations

import pytest

from tests.axes.tensor import jobs

pytestmark = pytest.mark.processes


def test_tensor_parallel_layer(two_processes):
    for result in two_processes.run(jobs.layer_collectives, False):
        assert result == {"forward": {"all_reduce": 2}, "backward": {"all_reduce": 2}}


def test_sequence_parallel_layer(two_processes):
    """The mirror in backward, and one coalesced reduction of pending gradients."""
    for result in two_processes.run(jobs.layer_collectives, True):
        assert result["forward"] == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
        assert result["backward"] == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_reduce": 1}


def test_the_vocabulary_embedding_keeps_a_shard_of_its_gradient(two_processes):
    ours = two_processes.run(jobs.embedding_gradient, "ours")[0]
    stock = two_processes.run(jobs.embedding_gradient, "stock")[0]
    assert ours["gradient"] == 500 * 16 and ours["largest"] <= 500 * 16
    assert stock["gradient"] == 1000 * 16


def test_any_axis_order_and_any_ranks(four_processes):
    for result in four_processes.run(jobs.any_axis_order):
        assert max(result) < 1e-12
