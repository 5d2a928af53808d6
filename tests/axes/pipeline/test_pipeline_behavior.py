"""Pipelines of unusual models and inputs, and failures of stages."""

from __future__ import annotations

import pytest

from parallelize.base.torch_private.torch_tensors import at_least
from tests.axes.pipeline import behavior_jobs as jobs

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("1f1b", 1), ("zbv", 2)])
def test_tuples_dicts_skips_and_changing_shapes(two_processes, schedule, stages_per_rank):
    assert max(two_processes.run(jobs.odd_model, schedule, stages_per_rank)) < 1e-12


@pytest.mark.parametrize("share", [False, True], ids=["on every rank", "on the first rank"])
def test_masks_and_positions_reach_every_stage(two_processes, share):
    assert max(two_processes.run(jobs.inputs_reach_every_stage, share)) < 1e-12


def test_modules_assigned_by_name_and_a_loss_without_parameters(two_processes):
    assert max(two_processes.run(jobs.explicit_assignment)) < 1e-12


FAILURES = [
    ("1f1b", 1, 1, 2, False, True),
    ("1f1b", 1, 0, 0, False, True),
    ("1f1b", 1, 0, 1, False, False),
    ("gpipe", 1, 1, 3, True, False),
    ("zbv", 2, 2, 1, True, True),
    ("zbv", 2, 0, 0, False, True),
]


@pytest.mark.parametrize(("schedule", "stages_per_rank", "layer", "microbatch", "backward", "first"), FAILURES)
def test_a_failure_is_raised_everywhere_and_the_next_step_works(
    two_processes, schedule, stages_per_rank, layer, microbatch, backward, first
):
    arguments = (schedule, stages_per_rank, layer, microbatch, backward, first)
    for result in two_processes.run(jobs.a_stage_fails, *arguments):
        rows = result["rows"]
        assert rows["microbatch"].startswith(f"{microbatch}, {'backward' if backward else 'forward'}"), rows
        assert rows["error"] == "ValueError: bang"
        assert backward or rows["module"] == f"blocks.{layer}"
        assert result["error"] < 1e-12


def test_the_failing_rank_keeps_its_own_traceback(two_processes):
    causes = [result["cause"] for result in two_processes.run(jobs.a_stage_fails, "1f1b", 1, 1, 2, False, True)]
    assert sorted(causes) == ["None", "ValueError('bang')"]


ZBV = pytest.param("zbv", marks=pytest.mark.skipif(not at_least(2, 13), reason="graphs' backwards cannot be split"))


@pytest.mark.sweep
@pytest.mark.variants(every=4)
@pytest.mark.parametrize("schedule", ["1f1b", ZBV])
@pytest.mark.parametrize("compiled_first", [True, False], ids=["before the plan", "after it"])
def test_compiled_layers_stay_compiled(two_processes, compiled_first, schedule):
    for num_graphs, error in two_processes.run(jobs.compiled_layers, compiled_first, schedule):
        assert num_graphs, "the layers run in eager mode"
        assert error < 1e-6  # the loss is computed in float32


@pytest.mark.sweep
def test_a_dead_process_is_named():
    from tests.support.processes import Pool

    pool = Pool(3)
    try:
        outcomes = pool.outcomes(jobs.a_process_dies, timeout_s=40)
        assert outcomes[1][0] == "silent"
        texts = [text for kind, text in (outcomes[0], outcomes[2]) if kind == "ok"]
        assert len(texts) == 2 and any("peer-lost" in text and "rank 1" in text for text in texts), outcomes
    finally:
        pool.close()


MISTAKES = {
    "more stages than layers": "more-stages-than-layers",
    "too few microbatches": "too-few-microbatches",
    "unknown axis": "unknown-axis",
    "zero without data": "no-data-axis",
    "early optimizer": "early-optimizer",
    "unknown schedule": "unknown-schedule",
    "unassigned": "unassigned-parameter",
    "indivisible batch": "indivisible-batch",
}


@pytest.mark.parametrize("which", MISTAKES)
def test_mistakes_are_named_before_anything_changes(two_processes, which):
    assert all(MISTAKES[which] in slugs for slugs in two_processes.run(jobs.mistakes, which))


@pytest.mark.parametrize(
    ("how", "slug"), [("order", "unit-order"), *((how, "absent-module-used") for how in ("uses", "reads"))]
)
def test_a_forward_that_uses_absent_modules_otherwise_is_refused(two_processes, how, slug):
    for error, row in two_processes.run(jobs.misread, how):
        assert error == "stage-failed" and slug in row, row


def test_a_run_repeats_to_the_bit(four_processes):
    for first, second in four_processes.run(jobs.repeats):
        assert first == second


def test_parameters_tied_by_the_plan(two_processes, four_processes):
    assert max(two_processes.run(jobs.ties_in_the_plan, ("embed.weight", "head.weight"))) < 1e-12
    members = ("blocks.0.0.weight", "blocks.1.0.weight", "blocks.3.0.weight")
    assert max(four_processes.run(jobs.ties_in_the_plan, members)) < 1e-12


def test_a_stage_that_sends_other_shapes_than_before_is_named(two_processes):
    for error, row in two_processes.run(jobs.paths_differ):
        assert error == "stage-failed" and "stage-output-changed" in row and "[2, 4]" in row, row
