"""`explain`: a model, a plan and a mesh to an `Explanation`. One process, no GPU, no weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from math import prod
from typing import Any

from torch import nn

from parallelize.analysis.advice import advise
from parallelize.analysis.explanation import AxisTotal, Explanation, MessageLine, ParameterLine, RankReport
from parallelize.analysis.machine import Machine, load_machine
from parallelize.analysis.memory import RankMemory, memory_of
from parallelize.analysis.records import OUTSIDE, Message
from parallelize.analysis.setting import Setting, make_setting
from parallelize.analysis.step import RankStep
from parallelize.analysis.subject import Subject, check
from parallelize.analysis.timing import StepTime, stage_time, step_time
from parallelize.layout import Layout
from parallelize.mesh import SAMPLE_AXES, MeshSpec
from parallelize.model_source import ModelSource, source_of
from parallelize.plan.pattern import generic
from parallelize.plan.resolve import ResolvedPlan
from parallelize.report import lies


def explain(
    model: str | os.PathLike | ModelSource | Callable[[], nn.Module],
    plan: Any = None,
    mesh: str | MeshSpec = "tp=8",
    *,
    hardware: str | os.PathLike | Machine = "h100-sxm",
    every_layer: bool = False,
    **options: Any,
) -> Explanation:
    """What a plan does to a model on a mesh of any size, what it sends and holds, and about how long a step takes.

    Args:
        model: as `read_model` takes it, or a function that builds the module.
        plan: as `parallelize_module` takes it; None: by the model.
        mesh: "pp=2,dp=4,tp=8". hardware: a shipped profile's name, or a YAML file.
        every_layer: analyse each layer, rather than each kind of layer once. The figures are the same.
        options: fields of `Setting`: batch, sequence, zero, schedule, num_microbatches, recompute, dtype, ...

    Raises: ParallelizeError for whatever would be wrong on the cluster.
    """
    setting = make_setting(mesh, options)
    machine = hardware if isinstance(hardware, Machine) else load_machine(hardware)
    return explain_subject(Subject(source_of(model), plan), setting, machine, every_layer=every_layer, advice=True)


def explain_subject(
    subject: Subject, setting: Setting, machine: Machine, *, every_layer: bool = False, advice: bool = False
) -> Explanation:
    """The same, of what has been resolved before."""
    check(subject, setting)
    steps, memories, time = measure(subject, setting, machine, every_layer=every_layer)
    reports = [_report(step, memory, machine) for step, memory in zip(steps, memories, strict=True)]
    plan, model = subject.plan_for(setting), subject.model(setting.weights_dtype)
    with_it, without = _recomputed_or_not(subject, setting)
    found = Explanation(
        model=f"{subject.source.text} ({type(model.root).__name__})",
        plan=plan.name if plan is not None else "none",
        plan_source=_shown(plan.source) if plan is not None else "",
        setting=setting.describe(),
        mesh=dict(setting.mesh.axes),
        options={key: value for key, value in asdict(setting).items() if key != "mesh"},
        num_parameters=sum(prod(fact.shape) for fact in model.parameters.values()),
        machine=machine.name,
        machine_memory_bytes=machine.memory_bytes,
        machine_sources=machine.sources,
        machine_constants=machine.constants,
        parameters=tuple(_parameter_lines(subject, setting)),
        ranks=tuple(reports),
        time=time,
        assumptions=tuple(_assumptions(setting, every_layer)),
        activations_without_recompute=without,
        activations_with_recompute=with_it,
    )
    return replace(found, advice=tuple(advise(subject, setting, machine, found))) if advice else found


def measure(
    subject: Subject, setting: Setting, machine: Machine, *, every_layer: bool = False, by_segment: bool = True
) -> tuple[list[RankStep], list[RankMemory], StepTime]:
    """The ranks that are looked at, what they hold, and the step's time."""
    schedule = setting.pipeline()
    steps = [subject.rank_step(setting, schedule, rank, every_layer) for rank in _looked_at(setting.size("pp"))]
    memories = [memory_of(step, by_segment) for step in steps]
    stages = [stage_time(steps[0], stage, machine) for stage in range(schedule.num_stages)]
    time = step_time(setting, schedule, stages, steps, memories, machine, model_flops(subject, setting))
    return steps, memories, time


def model_flops(subject: Subject, setting: Setting) -> float:
    """Of one step's tokens: three times the forward's products of the unsharded model, nothing recomputed.

    Source: PaLM, arXiv:2204.02311, app. B (here causal attention counts half, as fused kernels compute it).
    """
    alone = replace(
        setting,
        mesh=MeshSpec(dp=1),
        sequence_parallel=None,
        loss_parallel=None,
        fuse_loss=False,
        zero=0,
        recompute="off",
        batch=1,
        num_microbatches=1,
        ulysses=1,
    )
    step = subject.rank_step(alone, alone.pipeline(), 0)
    forward = sum(segment.flops for segment in step.segments(0, later=True).forward)
    return 3.0 * forward * setting.batch * setting.size(*SAMPLE_AXES)


def _looked_at(size: int) -> list[int]:
    """The first, a middle and the last rank of the pipeline."""
    return sorted({0, size // 2, size - 1})


def _recomputed_or_not(subject: Subject, setting: Setting) -> tuple[int, int]:
    """Peak of activations of the first rank, with full recompute and without any."""
    found = []
    for mode in ("full", "off"):
        other = replace(setting, recompute=mode)
        try:
            found.append(memory_of(subject.rank_step(other, other.pipeline(), 0)).activations)
        except Exception:  # a model without units to recompute
            found.append(0)
    return found[0], found[1]


# -- parameters ---------------------------------------------------------------------------------------------------


def _parameter_lines(subject: Subject, setting: Setting) -> Iterable[ParameterLine]:
    model, resolved, stages = subject.model(setting.weights_dtype), subject.resolved(setting), subject.stages(setting)
    groups: dict[tuple, list[Any]] = {}
    for fact in model.parameters.values():
        style, rule, local, how, layout = _row(resolved, fact.fqn, fact.shape)
        name = " = ".join(generic(name) for name in fact.names)
        owners = stages.owners.get(fact.fqn, (0,)) if stages is not None else (0,)
        held = groups.setdefault((name, style, rule, fact.shape, local, how), [0, owners[0], owners[-1], layout])
        held[:3] = held[0] + 1, min(held[1], owners[0]), max(held[2], owners[-1])
    for (name, style, rule, full, local, how), (count, first, last, layout) in groups.items():
        dim = layout.dim if layout is not None else None
        owned = layout.owned[:_DRAWN] if layout is not None else ()
        yield ParameterLine(name, count, style, rule, full, local, how, (first, last), count * prod(full), dim, owned)


_DRAWN = 16  # tp ranks whose pieces are told


def _row(
    resolved: ResolvedPlan | None, fqn: str, shape: tuple[int, ...]
) -> tuple[str, str, tuple[int, ...], str, Layout | None]:
    if resolved is None:
        return "", "", shape, "whole", None
    row = resolved.parameters[fqn]
    how = lies(row.layout, row.partial)
    return str(row.rule.style), _shown(row.rule.where), row.layout.local_shape(0), how, row.layout


def _shown(where: str) -> str:
    """A place in a file, without the folders that the reader's machine has."""
    return os.path.basename(where)


# -- ranks --------------------------------------------------------------------------------------------------------


def _report(step: RankStep, memory: RankMemory, machine: Machine) -> RankReport:
    messages = step.messages
    found = [step.segments(stage, later=True) for stage in step.mine]
    flops = sum(segment.flops for one in found for segment in (*one.forward, *one.backward))
    return RankReport(
        step.pp_rank,
        _units(step),
        sum(share.numel for share in step.shares),
        flops * step.setting.microbatches,
        memory,
        tuple(_message_lines(messages, step.setting, machine)),
        tuple(_totals(messages, step.setting, machine)),
    )


def _units(step: RankStep) -> str:
    """What the rank's stages own, in words."""
    if step.stages is None:
        return "the whole model"
    words = []
    for stage in step.mine:
        first, stop = step.stages.bounds(stage)
        units = step.stages.units[first:stop]
        words.append(units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}")
    return "; ".join(words)


def _message_lines(
    messages: Sequence[tuple[Message, int]], setting: Setting, machine: Machine
) -> Iterable[MessageLine]:
    groups: dict[tuple, int] = {}
    for message, times in messages:
        key = (*message[:4], generic(message.module) or _ROOT, message.phase)
        groups[key] = groups.get(key, 0) + times
    for (op, axis, ranks, size, module, phase), count in groups.items():
        one = Message(op, axis, ranks, size, module, phase)
        seconds = machine.message_s(one, setting.mesh) * count
        yield MessageLine(op, axis, ranks, phase, module, size, count, one.sent_bytes * count, seconds)


_ROOT = "loss" if OUTSIDE == "" else OUTSIDE


def _totals(messages: Sequence[tuple[Message, int]], setting: Setting, machine: Machine) -> Iterable[AxisTotal]:
    found: dict[str, list[Any]] = {}
    for message, times in messages:
        held = found.setdefault(message.axis, [0, 0, 0, 0.0, 0.0])
        held[0] = max(held[0], message.ranks)
        held[1] += times
        held[2] += message.bytes * times
        held[3] += message.sent_bytes * times
        held[4] += machine.message_s(message, setting.mesh) * times
    for axis, (ranks, count, size, sent, seconds) in sorted(found.items(), key=lambda item: -item[1][3]):
        inside = machine.link(setting.mesh, axis) is machine.inside
        yield AxisTotal(axis, ranks, count, size, sent, seconds, "inside a node" if inside else "between nodes")


def _assumptions(setting: Setting, every_layer: bool) -> Iterable[str]:
    yield "bytes and counts are those of the code that runs; times are estimates from the hardware profile's constants"
    yield "attention is a fused kernel (flash): it keeps query, key, value, output and one number a row, not the scores"
    yield "memory is what tensors hold; allocators add fragmentation, and a CUDA context and NCCL take 1 to 2 GB more"
    yield "each op takes the longer of its products and its bytes; in turn: nothing is hidden; overlapped: everything that can be"
    yield "model FLOPs are three times the unsharded forward's products; causal attention counts half; recompute does not count"
    yield "one step is forward, backward and optimiser; clipping adds scalars; evaluation and data loading are left out"
    if setting.zero == 3 and setting.size("pp") > 1:
        yield "ZeRO 3 gathers each unit twice a microbatch; with several stages on a rank some are gathered more often"
    if setting.overlap != "off":
        yield "overlapped linears send the same bytes in pieces; counts are those without overlap"
    if not every_layer:
        yield "layers that are alike were analysed once"
