"""A forward beside the backward of the microbatch before it: the same numbers, turns, failures, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from parallelize import MeshError, Options, parallelize_model
from parallelize.axes.pipeline.interleaved_actions import PairTrial
from parallelize.base.mesh import MeshSpec
from tests.axes.pipeline import pair_jobs as jobs
from tests.axes.pipeline.pipeline_jobs import mesh_parity
from tests.support.models import tiny_model
from tests.support.refused import refused, small_mesh

OPTIONS = {"num_microbatches": 3, "overlap_microbatches": True}
TENSOR = [
    ("llama", {"tp": 2}, {"sequence_parallel": True}),
    ("llama", {"tp": 2}, {"sequence_parallel": True, "overlap": "chunked", "loss_parallel": True}),
    ("mixtral", {"dp": 2}, {"ep": 2}),
]
MORE = [
    ("qwen3", {"tp": 2}, {"overlap": "auto"}),
    ("gpt2", {"dp": 2}, {"zero": 2}),
    ("mistral", {"cp": 2}, {}),
    ("llama", {"cp": 2}, {"ulysses": 2}),
]
MESHES = [
    ("llama", {"dp": 2, "tp": 2}, {"zero": 2, "sequence_parallel": True, "overlap": "chunked"}),
    ("qwen3_moe", {"dp": 2, "tp": 2}, {"ep": 4, "zero": 1}),
    ("qwen3", {"cp": 2, "tp": 2}, {"zero": 0, "sequence_parallel": True}),
]


@pytest.mark.processes
@pytest.mark.parametrize(("family", "axes", "options"), TENSOR, ids=str)
def test_a_step_in_pairs_equals_the_unsharded_model(two_processes, family, axes, options):
    two_processes.run(mesh_parity, family, axes, torch.float64, OPTIONS | options)


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize(("family", "axes", "options"), MORE, ids=str)
def test_a_step_in_pairs_over_other_axes_equals_the_unsharded_model(two_processes, family, axes, options):
    two_processes.run(mesh_parity, family, axes, torch.float64, OPTIONS | options)


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize(("family", "axes", "options"), MESHES, ids=str)
def test_a_step_in_pairs_equals_the_unsharded_model_on_four_ranks(four_processes, family, axes, options):
    four_processes.run(mesh_parity, family, axes, torch.float64, OPTIONS | options)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "axes", "options", "sizes"),
    [
        ("gpt2", {"tp": 2}, {"sequence_parallel": True}, jobs.DROPOUT),
        ("gpt2", {"cp": 2}, {}, jobs.DROPOUT),
        ("llama", {"tp": 2}, {"overlap": "chunked"}, {}),
    ],
    ids=["dropout over tp", "dropout over cp", "chunked"],
)
def test_forwards_run_beside_backwards_and_change_no_number(two_processes, family, axes, options, sizes):
    for result in two_processes.run(jobs.same_as_in_order, family, axes, options, sizes):
        assert result["together"] == 2
        assert result["error"] <= 1e-12
        assert (result["losses"] and result["bits"]) or "overlap" in options  # other chunks, other rounding


def test_a_trial_takes_turns_and_keeps_the_faster():
    for faster in (True, False):
        reports: list[str] = []
        trial = PairTrial(reports.append)
        kinds = []
        for step in range(20):
            kinds.append(trial.in_pairs)
            trial.take(trial.own_s or 0.0)
            slow = 9.0 if step < 2 or step == 7 else 1.0  # the first ones, and one that something else disturbs
            trial.end_step(slow * (1.0 if kinds[-1] is faster else 1.1))
        assert kinds == [True, False] * 6 + [True] + [faster] * 7
        assert not trial.is_running and len(reports) == 1
        assert reports[0].endswith(f"{'in pairs' if faster else 'in order'} from now on")


@pytest.mark.processes
@pytest.mark.parametrize("faster", [pytest.param(True, marks=pytest.mark.sweep), False], ids=["pairs", "order"])
def test_ranks_choose_together_by_the_mean_of_their_times(two_processes, faster):
    for result in two_processes.run(jobs.measured, faster):
        assert result["in_pairs"] is faster
        assert result["losses"]
        assert result["report"].endswith(f"{'in pairs' if faster else 'in order'} from now on")


def test_auto_is_in_order_where_nothing_can_overlap():
    chosen = Options(overlap_microbatches="auto", num_microbatches=4)
    assert chosen.complete().microbatch_overlap(MeshSpec(tp=2)) == "auto"
    for axes, options in (({"pp": 2}, {}), ({"dp": 2}, {"zero": 3}), ({"tp": 2}, {"num_microbatches": 1})):
        complete = replace(chosen, **options).complete()
        assert not complete.check_on(MeshSpec(**axes))
        assert complete.microbatch_overlap(MeshSpec(**axes)) is False
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    with small_mesh(tp=2) as mesh:
        parallel = parallelize_model(model, mesh, overlap_microbatches="auto", num_microbatches=4)
    assert parallel.pipeline.run_pair is None and parallel.pipeline.pair_trial is None


@pytest.mark.processes
@pytest.mark.parametrize(("at", "backward"), [(1, False), (2, False), (1, True), (2, True)])
def test_the_failure_of_one_of_a_pair_is_raised_everywhere_and_the_next_step_works(two_processes, at, backward):
    for result in two_processes.run(jobs.a_pair_fails, at, backward):
        assert result["rows"]["microbatch"].startswith(f"{at}, {'backward' if backward else 'forward'}")
        assert result["rows"]["error"] == "ValueError: bang"
        assert result["error"] < 1e-12


@pytest.mark.processes
@pytest.mark.parametrize(("why", "text"), [("recompute", "recomputes activations"), ("fully_shard", "fully_shard")])
def test_what_a_forward_and_a_backward_would_both_change_is_refused(two_processes, why, text):
    for slug, message in two_processes.run(jobs.refused, why):
        assert slug == "no-overlap"
        assert text in message


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["flops", "autocast"])
def test_modes_of_one_rank_and_autocast_change_nothing(two_processes, kind):
    errors = two_processes.run(jobs.watched_on_one_rank, kind)
    assert max(errors) <= 1e-12 if kind == "flops" else errors == [0.0, 0.0]


@pytest.mark.on_cpus("over NCCL the rank that does not count waits until the group's timeout")
@pytest.mark.processes
def test_counting_collectives_is_refused_on_every_rank(two_processes):
    assert two_processes.run(jobs.counted_on_one_rank) == ["no-overlap", "ranks-diverged"]


@pytest.mark.processes
def test_a_layer_that_a_backward_calls_is_refused(two_processes):
    for text in two_processes.run(jobs.recomputed_by_the_user):
        assert "no-overlap" in text or "a backward calls" in text, text


@pytest.mark.parametrize(
    ("axes", "options", "text"),
    [
        ({"pp": 2}, {}, "pp is 2"),
        ({"dp": 2}, {"zero": 3}, "ZeRO 3"),
        ({"tp": 2}, {"recompute": "selective"}, "recompute"),
        ({"tp": 2}, {"num_microbatches": 1}, "1 microbatch"),
    ],
    ids=["pp", "zero", "recompute", "microbatches"],
)
def test_where_nothing_can_run_beside_anything_is_refused_before_anything_changes(axes, options, text):
    model = tiny_model("llama")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with small_mesh(**axes) as mesh, refused(MeshError, "no-overlap", text, "overlap_microbatches"):
        parallelize_model(model, mesh, **(OPTIONS | options))
    assert before == {name: id(parameter) for name, parameter in model.named_parameters()}
