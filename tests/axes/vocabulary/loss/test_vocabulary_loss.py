"""Deferred logits on real processes: refused after a step, made by a compiled head, explained."""

from __future__ import annotations

import pytest

from tests.axes.vocabulary.loss import vocabulary_loss_jobs as jobs
from tests.tools.analysis.cost import explain_jobs
from tests.tools.analysis.cost.memory_cells import WITHIN, MemoryCell, compared, worst


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
    ("mesh", "options"),
    [
        ("tp=2", {}),
        ("tp=2", {"dtype": "bfloat16", "sequence_parallel": True, "num_microbatches": 2}),
        ("dp=2", {"zero": 2}),
        ("pp=2", {"schedule": "1f1b", "num_microbatches": 2}),
    ],
    ids=str,
)
def test_explained_memory(two_processes, mesh, options):
    """All live bytes of a step: full logits, which are 9% of them, would be more than what is allowed."""
    cell = MemoryCell(0, "llama", mesh, {"fuse_loss": True, **options}, "adamw")
    assert abs(worst(compared(cell, two_processes))) <= WITHIN


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_explained_traffic(two_processes, sequence_parallel):
    options = {"sequence_parallel": sequence_parallel, "fuse_loss": True}
    arguments = ("gemma2", {"tp": 2}, 2, 33, options, {})
    predicted = explain_jobs.predicted_messages(*arguments)
    for _, tp_rank, result in two_processes.run(explain_jobs.sent_messages, *arguments):
        assert tp_rank or result == predicted[0], (result, predicted[0])
