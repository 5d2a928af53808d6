"""Steps, memory and time of one setting: used by `explain`, its advice, and `fit`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import prod

from parallelize.axes.tensor.experts.expert_parallel import num_choices, scaled_experts_of
from parallelize.base.errors import ModelError, Problem
from parallelize.base.mesh import SAMPLE_AXES, MeshSpec
from parallelize.tools.analysis.cost.machine import Machine
from parallelize.tools.analysis.cost.memory import RankMemory, memory_of
from parallelize.tools.analysis.cost.setting import RECORDED, Setting
from parallelize.tools.analysis.cost.timing import StageTime, StepTime, stage_time, step_time
from parallelize.tools.analysis.cost.training_step import RankStep
from parallelize.tools.analysis.outline.decoder import decoder_of
from parallelize.tools.analysis.outline.outlined import OutlinedSubject
from parallelize.tools.analysis.subject import Subject

AnySubject = Subject | OutlinedSubject


def costed(subject: AnySubject, setting: Setting) -> AnySubject:
    """What the costs of a setting are computed from: the recorded code of the model, or its outline where other kernels
    than those of the code are asked for. Raises: ModelError `no-outline`."""
    if isinstance(subject, OutlinedSubject) or setting.kernels == RECORDED:
        return subject
    outline = outline_of(subject)
    if outline is None:
        what = f"{setting.kernels!r} kernels are known for decoders such as Llama and GPT-2, not for this model"
        raise ModelError(Problem("no-outline", what, fix=f"kernels={RECORDED!r}: what the model's code calls"))
    return outline


def outline_of(subject: Subject) -> OutlinedSubject | None:
    """The outline of a model of `transformers`; None where it is none that an outline can stand for."""
    if subject.outline is None:
        decoder = decoder_of(subject.source.config) if subject.source.config is not None else None
        subject.outline = (OutlinedSubject(decoder) if decoder is not None else None,)
    return subject.outline[0]


def measure(
    subject: AnySubject,
    setting: Setting,
    machine: Machine,
    *,
    every_layer: bool = False,
    by_segment: bool = True,
    walks: bool = True,
) -> tuple[list[RankStep], list[RankMemory], StepTime]:
    """Steps and memories of the analyzed pp ranks, and the time of a step. by_segment, walks: as `memory_of` takes
    them."""
    steps, memories = measure_memory(subject, setting, every_layer=every_layer, by_segment=by_segment, walks=walks)
    return steps, memories, measure_time(subject, setting, machine, steps, memories, simulated=walks)


def measure_memory(
    subject: AnySubject, setting: Setting, *, every_layer: bool = False, by_segment: bool = True, walks: bool = True
) -> tuple[list[RankStep], list[RankMemory]]:
    """Steps and memories of the analyzed pp ranks."""
    subject, schedule = costed(subject, setting), setting.pipeline(listed=walks)
    steps = [subject.rank_step(setting, schedule, rank, every_layer) for rank in _analyzed_ranks(setting.size("pp"))]
    return steps, [memory_of(step, by_segment, walks) for step in steps]


def measure_time(
    subject: AnySubject,
    setting: Setting,
    machine: Machine,
    steps: list[RankStep],
    memories: list[RankMemory],
    *,
    simulated: bool = True,
) -> StepTime:
    """The time of a step whose analyzed ranks are `steps`. simulated: as `step_time` takes it."""
    schedule = setting.pipeline(listed=simulated)
    known: dict[Hashable, StageTime] = {}
    stages = []
    for stage in range(schedule.num_stages):
        key = steps[0].alike(stage)
        if key not in known:
            known[key] = stage_time(steps[0], stage, machine)
        stages.append(known[key])
    return step_time(
        setting,
        schedule,
        machine,
        stages=stages,
        steps=steps,
        memories=memories,
        model_flops=model_flops(subject, setting),
        simulated=simulated,
    )


def model_flops(subject: AnySubject, setting: Setting) -> float:
    """Operations for one step's tokens: three times those of the unsharded model's forward matmuls, without recompute,
    and of experts those that tokens chose.

    Source: PaLM, arXiv:2204.02311, app. B (here causal attention counts half, as fused kernels compute it).
    """
    if isinstance(subject := costed(subject, setting), OutlinedSubject):
        return subject.model_flops(setting)
    unsharded = replace(
        setting,
        mesh=MeshSpec(dp=1),
        sequence_parallel=False,
        loss_parallel=False,
        fuse_loss=False,
        zero=0,
        recompute="off",
        batch=1,
        num_microbatches=1,
        ulysses=1,
        ep=1,
        etp=1,
    )
    step = subject.rank_step(unsharded, unsharded.pipeline(), 0)
    forward = sum(segment.flops for segment in step.segments(0, later=True).forward)
    return 3.0 * (forward - _flops_of_unchosen(subject, setting)) * setting.batch * setting.size(*SAMPLE_AXES)


def _flops_of_unchosen(subject: Subject, setting: Setting) -> float:
    """Operations of one sequence's forward on rows of zeros: of experts that a token did not choose, where a stock
    block calls all."""
    model, total = subject.model(setting.weights_dtype), 0.0
    for experts in scaled_experts_of(model):
        unchosen = 1 - num_choices(model, experts.fqn) / experts.num_experts
        total += 2.0 * setting.sequence * unchosen * sum(map(prod, experts.shapes.values()))
    return total


def _analyzed_ranks(size: int) -> list[int]:
    """The first, a middle and the last pp rank."""
    return sorted({0, size // 2, size - 1})
