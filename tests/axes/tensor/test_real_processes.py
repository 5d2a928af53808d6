"""Real gloo processes: ranks that disagree are named, a mistake of one reaches all, FSDP2 on top."""

from __future__ import annotations

import pytest

from tests.axes.tensor import jobs

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("setup", "slug", "named"),
    [
        ("other plan", "ranks-disagree", "plan "),
        ("other option", "ranks-disagree", "loss_parallel"),
        ("other model", "ranks-disagree", "parameter model.layers"),
        ("other weights", "replicas-differ", "model.norm.weight"),
    ],
)
def test_ranks_that_disagree_are_named_before_anything_changes(two_processes, setup, slug, named):
    for slugs in two_processes.run(jobs.fails, setup, timeout_s=30):
        assert slug in slugs, slugs
        assert named in slugs[-1] and "rank" in slugs[-1]


@pytest.mark.parametrize(("setup", "slug"), [("bad plan", "unmatched-rule"), ("no such plan", "no-such-plan")])
def test_a_mistake_on_one_rank_reaches_every_rank(two_processes, setup, slug):
    slugs_of_ranks = two_processes.run(jobs.fails, setup, timeout_s=30)
    assert any(slug in slugs for slugs in slugs_of_ranks)
    assert all(slug in slugs or "ranks-disagree" in slugs for slugs in slugs_of_ranks)


@pytest.mark.sweep
def test_a_missing_rank_is_named_in_seconds(two_processes):
    present, _ = two_processes.run(jobs.fails, "missing", timeout_s=30)
    assert "ranks-missing" in present and "ranks 1 " in present[-1]


def test_other_inputs_over_tp_are_named(two_processes):
    for result in two_processes.run(jobs.other_data):
        assert "replicas-differ" in result and "input_ids" in result[-1]


@pytest.mark.variants(every=7)
@pytest.mark.parametrize("accumulate", [False, True], ids=["one-batch", "accumulation"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi3"])
def test_fully_shard_on_top(four_processes, family, sequence_parallel, accumulate):
    options = {"sequence_parallel": sequence_parallel, "loss_parallel": True}
    for result in four_processes.run(jobs.fully_sharded, family, options, False, accumulate):
        assert max(result.values()) < 1e-12, result


def test_fully_shard_in_mixed_precision(four_processes):
    """bfloat16 compute, float32 storage: within the rounding of bfloat16 matmuls."""
    options = {"sequence_parallel": True, "loss_parallel": True}
    for result in four_processes.run(jobs.fully_sharded, "llama", options, True, True):
        assert max(result.values()) < 16 * 2**-8, result
