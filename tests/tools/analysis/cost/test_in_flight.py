"""The closed forms of a pipeline equal its simulation where stages are alike, and its walk's peak."""

from __future__ import annotations

import pytest

from parallelize.axes.pipeline.schedules import build_schedule
from parallelize.axes.pipeline.timeline import Costs, simulate
from parallelize.base.mesh import MeshSpec
from parallelize.tools.analysis.cost.in_flight import pipeline_s, stages_in_flight
from parallelize.tools.analysis.cost.memory import memory_of
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.outline.decoder import Decoder
from parallelize.tools.analysis.outline.outlined import OutlinedSubject

CASES = [("1f1b", 4, 1, 16), ("1f1b", 3, 1, 2), ("interleaved_1f1b", 4, 2, 16), ("interleaved_1f1b", 2, 4, 8)]


@pytest.mark.parametrize(("name", "ranks", "per_rank", "count"), CASES)
def test_the_time_is_that_of_the_simulation(name, ranks, per_rank, count):
    schedule = build_schedule(name, ranks, count, per_rank)
    stages = schedule.num_stages
    expected = simulate(schedule, Costs([1.0] * stages, [2.0] * stages)).makespan
    assert pipeline_s(schedule, [1.0] * stages, [2.0] * stages, 0.0) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "ranks", "per_rank", "count"), CASES)
def test_as_many_microbatches_wait_as_in_the_simulation(name, ranks, per_rank, count):
    expected = simulate(build_schedule(name, ranks, count, per_rank)).in_flight.ranks
    assert [stages_in_flight(ranks, per_rank, count, rank).total() for rank in range(ranks)] == list(expected)


@pytest.mark.parametrize(("name", "ranks", "per_rank", "count"), CASES)
def test_the_peak_is_that_of_the_walk(name, ranks, per_rank, count):
    decoder = Decoder(layers=24, hidden=256, ffn=512, heads=4, kv_heads=2, vocab=512)
    setting = Setting(
        MeshSpec(pp=ranks, dp=2), batch=count, num_microbatches=count, sequence=128, schedule=name,
        stages_per_rank=per_rank if per_rank > 1 else None, dtype="bfloat16", kernels="fused",
    ).complete()  # fmt: skip
    subject = OutlinedSubject(decoder)
    for rank in range(ranks):
        step = subject.rank_step(setting, setting.pipeline(), rank)
        assert memory_of(step, walks=False).peak == pytest.approx(memory_of(step).peak, rel=0.02)
