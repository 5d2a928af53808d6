"""Sampling and generation on real gloo processes: the unsharded model's tokens, greedy and sampled."""

from __future__ import annotations

import pytest

from tests.axes.vocabulary.generation import generation_jobs as jobs

pytestmark = pytest.mark.processes
MODES = [{}, {"sequence_parallel": True, "loss_parallel": True}]


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("options", MODES, ids=["tensor", "sequence-loss"])
@pytest.mark.parametrize(("family", "tp"), [("llama", 2), ("mixtral", 2), ("gpt2", 4), ("gemma3", 4)])
def test_tokens_of_ranks_that_are_seeded_apart(request, family, tp, options):
    """Other families: on threads, test_generation.py."""
    processes = request.getfixturevalue({2: "two_processes", 4: "four_processes"}[tp])
    assert processes.run(jobs.tokens_differ, family, tp, options) == [[]] * tp


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options", [*MODES, {"loss_parallel": True, "fuse_loss": True}], ids=["tensor", "sequence-loss", "fused"]
)
def test_compiled_tokens_on_two_ranks(two_processes, options):
    assert two_processes.run(jobs.compiled_tokens_differ, options) == [False] * 2


@pytest.mark.on_cpus("the generator of the CPU is looked at")
def test_generators_after_a_generation(two_processes):
    first, second = two_processes.run(jobs.generators_after)
    assert first == (True, False)  # the first rank has drawn from its own
    assert second == (True, True)


def test_sampling_on_four_ranks(four_processes):
    assert four_processes.run(jobs.sampled_differ, 4) == [[]] * 4
