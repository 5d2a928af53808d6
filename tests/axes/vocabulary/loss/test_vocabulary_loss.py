"""Losses and log-probabilities over a sharded vocabulary, on real processes."""

from __future__ import annotations

import pytest
import torch

from tests.axes.vocabulary.loss import vocabulary_loss_jobs as jobs
from tests.tools.analysis.cost import explain_jobs


def below(result: list[dict[str, float]], dtype: torch.dtype) -> None:
    wrong = {name: error for errors in result for name, error in errors.items() if not error <= jobs.BOUND[dtype]}
    assert not wrong, wrong


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_two_ranks(two_processes, dtype):
    below(two_processes.run(jobs.losses, 11, dtype), dtype)
    below(two_processes.run(jobs.log_probs, 11, dtype), dtype)


@pytest.mark.parametrize(("vocab", "dtype"), [(10, torch.float64), (3, torch.float64), (10, torch.float32)])
def test_four_ranks_some_of_them_without_entries(four_processes, vocab, dtype):
    below(four_processes.run(jobs.losses, vocab, dtype), dtype)
    below(four_processes.run(jobs.log_probs, vocab, dtype), dtype)


@pytest.mark.variants(every=3)
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"sequence_parallel": True}), ("gpt2", {"loss_parallel": True}), ("gemma2", {}), ("bert", {})],
)
def test_planned_models(two_processes, family, options):
    two_processes.run(jobs.planned, family, options)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "bert"])
def test_models_that_compute_their_own_loss(two_processes, family):
    for error, gradients, deferred in two_processes.run(jobs.own_loss, family):
        assert error < 5e-6 and gradients < 5e-6 and deferred


def test_four_ranks_plan(four_processes):
    four_processes.run(jobs.planned, "gemma2", {"loss_parallel": True, "sequence_parallel": True})


@pytest.mark.variants(every=2)
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2, "tp": 2}, {"zero": 3}),
        ({"pp": 2, "tp": 2}, {"schedule": "1f1b", "num_microbatches": 4, "sequence_parallel": True}),
        ({"pp": 2, "dp": 2}, {"zero": 2, "recompute": "full", "num_microbatches": 2}),
        ({"dp": 4}, {"zero": 3}),
    ],
    ids=str,
)
def test_whole_meshes_step_as_without_it(four_processes, mesh, options):
    expected = four_processes.run(jobs.steps, mesh, options)[0]
    for result in four_processes.run(jobs.steps, mesh, {**options, "fuse_loss": True}):
        assert result == pytest.approx(expected, rel=2e-5)


@pytest.mark.variants(every=2)
@pytest.mark.parametrize("look", ["evaluate", "forward", "no backward", "generate"])
def test_zero_3_forgets_weights_of_before_a_step(two_processes, look):
    """A head that defers its logits stays gathered where no backward lets it go; the step's weights are gathered all
    the same."""
    expected = two_processes.run(jobs.steps_with_looks, {"dp": 2}, {"zero": 1}, "")[0]
    for result in two_processes.run(jobs.steps_with_looks, {"dp": 2}, {"zero": 3}, look):
        assert result == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_zero_3_in_a_pipeline_forgets_them_too(four_processes, recompute):
    """Several forwards are in flight when the head's unit is gathered again."""
    mesh, options = {"pp": 2, "dp": 2}, {"schedule": "1f1b", "num_microbatches": 2, "recompute": recompute}
    expected = four_processes.run(jobs.steps_with_looks, mesh, {**options, "zero": 1}, "")[0]
    for result in four_processes.run(jobs.steps_with_looks, mesh, {**options, "zero": 3}, "evaluate"):
        assert result == pytest.approx(expected, rel=2e-6)


def test_logits_of_before_a_step_are_refused_under_zero_3(two_processes):
    assert two_processes.run(jobs.kept_over_a_step) == [("weight-changed",)] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("loss_parallel", [False, True])
def test_a_compiled_head_makes_its_logits(two_processes, loss_parallel):
    kind = "ShardedLogits" if loss_parallel else "Tensor"
    for error, result in two_processes.run(jobs.compiled, loss_parallel):
        assert error < 1e-12 and result == kind


@pytest.mark.on_cpus("kernels of a GPU allocate otherwise")
@pytest.mark.variants(every=2)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"tp": 2}, {"fuse_loss": True}),
        ({"tp": 2}, {"fuse_loss": True, "dtype": torch.bfloat16, "sequence_parallel": True, "num_microbatches": 2}),
        ({"dp": 2}, {"fuse_loss": True, "zero": 2}),
        ({"pp": 2}, {"fuse_loss": True, "schedule": "1f1b"}),
    ],
    ids=str,
)
def test_explained_memory(two_processes, sizes, options):
    """As `test_explained_memory.py`: what stays is exact; logits are not among what comes and goes."""
    arguments = ("llama", sizes, 4, 33, options, {"num_hidden_layers": 4, "vocab_size": 1031})
    predicted = explain_jobs.predicted_memory(*arguments)
    for pp_rank, tp_rank, dp_rank, result in two_processes.run(explain_jobs.measured_memory, *arguments):
        expected = predicted[pp_rank]
        if tp_rank or dp_rank:
            continue
        for key in ("parameters", "gradients", "optimizer"):
            assert expected[key] == result[key], (key, expected[key], result[key])
        assert expected["activations"] == pytest.approx(result["activations"], rel=0.03)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_explained_traffic(two_processes, sequence_parallel):
    options = {"sequence_parallel": sequence_parallel, "fuse_loss": True}
    arguments = ("gemma2", {"tp": 2}, 2, 33, options, {})
    predicted = explain_jobs.predicted_messages(*arguments)
    for _, tp_rank, result in two_processes.run(explain_jobs.sent_messages, *arguments):
        assert tp_rank or result == predicted[0], (result, predicted[0])
