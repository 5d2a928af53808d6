"""Deferred logits on real processes: refused after a step, made by a compiled head, explained."""

from __future__ import annotations

import pytest
import torch

from tests.axes.vocabulary.loss import vocabulary_loss_jobs as jobs
from tests.tools.analysis.cost import explain_jobs


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
