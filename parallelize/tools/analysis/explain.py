"""`explain`: from a model, a plan and a mesh to an `Explanation`. One process, no GPU, no weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from math import prod
from typing import Any

from torch import nn

from parallelize.axes.tensor.flex_heads import calls_flex_attention
from parallelize.base.errors import ModelError, ParallelizeError
from parallelize.base.mesh import MeshSpec
from parallelize.ops.attention.flex_model import ASSUMED_SHARE
from parallelize.plan.models.model_source import ModelSource, source_of
from parallelize.plan.pattern import generic
from parallelize.plan.resolved import ParameterRow, ResolvedPlan
from parallelize.plan.stages import Costs
from parallelize.state.report_tables import row_text
from parallelize.tools.analysis.cost.intervals import interval_of
from parallelize.tools.analysis.cost.load_balance import LoadRecord
from parallelize.tools.analysis.cost.machine import Machine, load_machine
from parallelize.tools.analysis.cost.memory import RankMemory, device_bytes, memory_of
from parallelize.tools.analysis.cost.setting import RECORDED, Setting, make_setting
from parallelize.tools.analysis.cost.training_step import RankStep
from parallelize.tools.analysis.findings import gathered_modules
from parallelize.tools.analysis.measure import costed, measure
from parallelize.tools.analysis.record.kernel_sets import kernel_set
from parallelize.tools.analysis.record.trace_data import Message
from parallelize.tools.analysis.recorded_load import load_balance
from parallelize.tools.analysis.show.explanation import (
    Advice,
    AxisTotal,
    Explanation,
    MessageLine,
    ParameterLine,
    RankReport,
    WorstRouting,
)
from parallelize.tools.analysis.subject import Subject, check


def explain(
    model: str | os.PathLike | ModelSource | Callable[[], nn.Module],
    plan: Any = None,
    mesh: str | MeshSpec = "tp=8",
    *,
    hardware: str | os.PathLike | Machine = "h100-sxm",
    every_layer: bool = False,
    record: LoadRecord | None = None,
    costs: Costs | None = None,
    **options: Any,
) -> Explanation:
    """Predict memory, messages and time of a training step on a mesh of any size, without running it.

    Args:
        model: a config.json or its folder, a model type of `transformers`, a published size such as "llama-3-8b", a
            string "package.module:function", a `ModelSource`, or a function that builds the module.
        plan: as `parallelize_module` takes it; None: the plan of the model's family.
        mesh: sizes of the axes, such as "pp=2,dp=4,tp=8", or a `MeshSpec`.
        hardware: the name of a shipped profile (h100-sxm, h200, a100, cpu), a YAML file of that form, or a `Machine`.
        every_layer: run each layer, rather than a few of each class of equal layers. The figures are the same.
        record: lengths of samples and routes that a run has recorded: `Explanation.balance` says how evenly they are
            computed over ranks, and what balances them.
        costs: of pipeline units, as `parallelize_model` takes them.
        options: fields of `Options`, as `parallelize_model` takes them, and of `Setting`: `batch` (sequences per data
            rank and step), `sequence` (tokens of a sequence), `weights_dtype`, `optimizer`, `offload_state`,
            `transport`.

    Returns:
        Bytes and counts, which are exact or have the bounds of docs/check-before-launch.md, and estimated times.

    Raises:
        ParallelizeError: for mistakes that a run would report: of the options (`unknown-option`, `bad-option`), the
            mesh (`unknown-axis`, `axis-order`, `no-data-axis`), the plan (`unmatched-rule`, `uneven-heads`, ...) or
            stages (`more-stages-than-layers`). Also `unknown-hardware`, `bad-hardware`; `cannot-record` where the
            forward reads values; `process-group-taken` where the process has a process group; `bad-record` for a
            record that is not of this model, or has too few samples.

    Cost:
        No communication: one process, tensors without values.
    """
    setting = make_setting(mesh, options)
    machine = hardware if isinstance(hardware, Machine) else load_machine(hardware)
    subject = Subject(source_of(model), plan, costs=costs)
    return explain_subject(subject, setting, machine, every_layer=every_layer, advice=True, record=record)


def explain_subject(
    subject: Subject,
    setting: Setting,
    machine: Machine,
    *,
    every_layer: bool = False,
    advice: bool = False,
    record: LoadRecord | None = None,
) -> Explanation:
    """`explain`, with the caches of `subject`. advice: also compute single changes that would help."""
    setting = subject.complete(setting)
    check(subject, setting)
    steps, memories, time = measure(subject, setting, machine, every_layer=every_layer)
    reports = [_report(step, memory, machine) for step, memory in zip(steps, memories, strict=True)]
    plan, model = subject.resolved(setting).plan, subject.model(setting.weights_dtype)
    explanation = Explanation(
        model=f"{subject.source.text} ({type(model.root).__name__})",
        plan=plan.name,
        plan_source=os.path.basename(plan.source),
        setting=setting.describe(),
        mesh=dict(setting.mesh.axes),
        options={key: value for key, value in asdict(setting).items() if key != "mesh"},
        num_parameters=sum(fact.num_weights for fact in model.parameters.values()),
        machine=machine.name,
        machine_memory_bytes=machine.memory_bytes,
        machine_sources=machine.sources,
        machine_constants=machine.constants,
        parameters=tuple(_parameter_lines(subject, setting)),
        ranks=tuple(reports),
        time=time,
        assumptions=(
            *_assumptions(setting, every_layer, gathered_modules(subject.resolved(setting))),
            *_assumptions_of_blocks(model.objects.values()),
        ),
        activations_without_recompute=_peak_activation_bytes(subject, setting, "off"),
        activations_with_recompute=_peak_activation_bytes(subject, setting, "full"),
        worst_routing=worst_routing(subject, setting, steps, memories) if setting.kernels == RECORDED else None,
        kernels=_kernels_note(setting),
        device_bytes=device_bytes(
            max(memory.peak for memory in memories), setting, machine.memory_bytes, at_limit=True
        ),
        interval=interval_of(time.step_s, setting, machine, has_experts=_has_experts(subject, setting)),
        not_scored=machine.not_scored,
        balance=load_balance(subject, setting, record) if record is not None else None,
    )
    if not advice:
        return explanation
    return replace(explanation, advice=tuple(advise(subject, setting, machine, explanation)))


def _kernels_note(setting: Setting) -> str:
    source = "as the model's code calls them" if setting.kernels == RECORDED else "by outline"
    return f"{setting.kernels} kernels ({kernel_set(setting.kernels).title}; {source})"


def _has_experts(subject: Subject, setting: Setting) -> bool:
    return any(module.num_experts for module in subject.model(setting.weights_dtype).modules.values())


def _peak_activation_bytes(subject: Subject, setting: Setting, recompute: str) -> int:
    """Of the first pp rank, with that value of `recompute`; 0 where the model has no units to recompute, or gives them
    a cache."""
    setting = replace(setting, recompute=recompute)
    try:
        return memory_of(costed(subject, setting).rank_step(setting, setting.pipeline(), 0)).activations
    except ModelError as error:
        if not {"no-recompute-units", "cache-in-recompute"} & {*error.slugs}:
            raise
        return 0


def worst_routing(
    subject: Subject, setting: Setting, steps: Sequence[RankStep], memories: Sequence[RankMemory]
) -> WorstRouting | None:
    """What one rank of `ep` costs if it gets all tokens, of the analyzed pp rank where that takes most memory; None
    without `ep`.

    steps, memories: of the analyzed pp ranks, where tokens are divided evenly.
    """
    experts = {fqn for fqn, row in subject.resolved(setting).modules.items() if row.contract.sends_tokens}
    if not experts:
        return None
    routings = []
    for step, memory in zip(steps, memories, strict=True):
        worst = subject.rank_step(setting, step.schedule, step.pp_rank, to_one_rank=True)
        received, even_received = (_received_bytes(each, experts) for each in (worst, step))
        peak = memory_of(worst, by_segment=False).peak
        rows = worst.trace.expert_rows, step.trace.expert_rows
        choices = worst.trace.expert_choices, step.trace.expert_choices
        routings.append(WorstRouting(*rows, *choices, received, even_received, peak, memory.peak))
    return max(routings, key=lambda routing: routing.peak_bytes)


def _received_bytes(step: RankStep, experts: Collection[str]) -> int:
    """What modules receive from other ranks in a step."""
    return sum(message.received_bytes * times for message, times in step.messages if message.module in experts)


# -- parameters ---------------------------------------------------------------------------------------------------


MAX_DRAWN_RANKS = 16  # tp ranks whose intervals are in the explanation


def _parameter_lines(subject: Subject, setting: Setting) -> Iterable[ParameterLine]:
    """One line for all parameters with equal generic names, styles, shapes and layouts."""
    resolved = subject.resolved(setting)
    lines: dict[tuple, ParameterLine] = {}
    for row in resolved.parameters.values():
        stages = sorted(resolved.stage_of(name) for name in row.fact.names)
        line = _parameter_line(resolved, row, (stages[0], stages[-1]))
        key = (line.name, line.style, line.rule, line.full, line.local, line.lies)
        if key in lines:
            same = lines[key]
            stages_of_both = min(same.stages[0], line.stages[0]), max(same.stages[1], line.stages[1])
            line = replace(same, count=same.count + 1, numel=same.numel + line.numel, stages=stages_of_both)
        lines[key] = line
    return lines.values()


def _parameter_line(resolved: ResolvedPlan, row: ParameterRow, stages: tuple[int, int]) -> ParameterLine:
    line = ParameterLine(
        name=" = ".join(generic(name) for name in row.fact.names),
        count=1,
        style="",
        rule="",
        full=row.fact.shape,
        local=row.layout.local_shape(0),
        lies="full",
        stages=stages,
        numel=prod(row.fact.shape),
    )
    if "tp" not in resolved.mesh.names:
        return line
    return replace(
        line,
        style=str(row.rule.style),
        rule=os.path.basename(row.rule.where),
        lies=row_text(row),
        dim=row.layout.dim,
        owned=row.layout.owned[:MAX_DRAWN_RANKS],
    )


# -- ranks --------------------------------------------------------------------------------------------------------


def _report(step: RankStep, memory: RankMemory, machine: Machine) -> RankReport:
    messages = step.messages
    stages = [step.segments(stage, later=True) for stage in step.local_stages]
    flops = sum(segment.flops for stage in stages for segment in (*stage.forward, *stage.backward))
    return RankReport(
        pp_rank=step.pp_rank,
        units=_units(step),
        parameters=sum(shard.weights for shard in step.shards),
        flops=flops * step.setting.step_microbatches,
        memory=memory,
        messages=tuple(_message_lines(messages, step.setting, machine)),
        totals=tuple(_totals(messages, step.setting, machine)),
    )


def _units(step: RankStep) -> str:
    """The units of the rank's stages, as text."""
    if step.stages is None:
        return "the full model"
    texts = []
    for stage in step.local_stages:
        units = step.stages.units_of(stage)
        texts.append(units[0] if len(units) == 1 else f"{units[0]} to {units[-1]}")
    return "; ".join(texts)


def _message_lines(
    messages: Sequence[tuple[Message, int]], setting: Setting, machine: Machine
) -> Iterable[MessageLine]:
    """One line for all messages that differ only in the layer's number."""
    counts: Counter[Message] = Counter()
    for message, times in messages:
        # messages outside of any module are those of the loss
        counts[message._replace(module=generic(message.module) or "loss")] += times
    for message, count in counts.items():
        yield MessageLine(
            op=message.op,
            axis=message.axis,
            ranks=message.ranks,
            phase=message.phase,
            module=message.module,
            bytes=message.bytes,
            count=count,
            sent_bytes=message.sent_bytes * count,
            seconds=machine.message_s(message, setting.mesh_of(message.axis)) * count,
        )


def _totals(messages: Sequence[tuple[Message, int]], setting: Setting, machine: Machine) -> Iterable[AxisTotal]:
    """Sums over the messages of each axis, the largest first."""
    totals: dict[str, AxisTotal] = {}
    for message, times in messages:
        axis = message.axis
        if axis not in totals:
            placement = machine.placement(setting.mesh_of(axis), axis)
            totals[axis] = AxisTotal(
                axis,
                0,
                0,
                0,
                0.0,
                0.0,
                "inside a node" if placement.nodes == 1 else f"{placement.nodes} nodes, {placement.in_node} a node",
            )
        total = totals[axis]
        totals[axis] = replace(
            total,
            ranks=max(total.ranks, message.ranks),
            count=total.count + times,
            bytes=total.bytes + message.bytes * times,
            sent_bytes=total.sent_bytes + message.sent_bytes * times,
            seconds=total.seconds + machine.message_s(message, setting.mesh_of(message.axis)) * times,
        )
    return sorted(totals.values(), key=lambda total: -total.sent_bytes)


def _assumptions(setting: Setting, every_layer: bool, gathered: dict[str, int]) -> Iterable[str]:
    """gathered: modules that every rank of `cp` runs on the full sequence, as `gathered_modules` has them."""
    yield "bytes and counts are those of the code that runs; times are estimates from the hardware profile's constants"
    yield (
        "attention is a fused (flash) kernel: it saves query, key, value, output and one number per token and head, "
        "not the scores"
    )
    yield (
        "peaks are those of tensors; the verdict adds what the allocator holds beside them, and what a CUDA context "
        "and NCCL take"
    )
    yield (
        "matmuls take their compute and their memory traffic, other ops their traffic, and a stage no less than the "
        "host needs to launch them; sequential: nothing is hidden; overlapped: everything that can be"
    )
    yield (
        "model FLOPs are three times those of the unsharded forward's matmuls; causal attention counts half; recompute "
        "does not count"
    )
    yield "one step is forward, backward and optimizer; clipping adds scalars; evaluation and data loading are left out"
    if gathered:
        names = ", ".join(f"{name} (x{count})" for name, count in gathered.items())
        yield (
            f"every rank of cp computes {names} for the full sequence and stores its activations: cp does not divide "
            "that work, which is counted"
        )
    if setting.zero == 3 and setting.size("pp") > 1:
        yield (
            "ZeRO 3 gathers each unit twice per microbatch; with several stages on a rank some are gathered more often"
        )
    if setting.offload_state:
        yield "optimizer state is in host memory; during a step some parameters' is on the device, which is left out"
    if setting.overlap != "off":
        yield "overlapped linears send the same bytes in chunks; counts are those without overlap"
    if not every_layer:
        yield "equal layers were analyzed once"


def _assumptions_of_blocks(modules: Iterable[nn.Module]) -> Iterable[str]:
    if any(map(calls_flex_attention, modules)):
        yield (
            "flex_attention computes the blocks of its mask that are not empty; of a mask that the forward makes of "
            f"tensors without values, {ASSUMED_SHARE:.0%} of all pairs of tokens, as of a causal one"
        )


# -- advice ----------------------------------------------------------------------------------------------------------
# Single changes that would make a setting fit, or faster. Each is computed like the setting itself.


MIN_SAVING = 0.02  # a change that saves a smaller fraction of time or memory is not listed
MAX_CHANGES = 6


def advise(subject: Subject, setting: Setting, machine: Machine, now: Explanation) -> list[Advice]:
    """The effect of single changes: first those that make the setting fit, then those that save time, then memory.

    now: the explanation of `setting`.
    """
    ranked = []
    for change, changed_setting in changes(setting):
        outcome = outcome_of(subject, changed_setting, machine)
        if outcome is not None:
            ranked.append(_ranked_advice(change, *outcome, now))
    listed = [pair for pair in ranked if pair is not None]
    return [advice for _, advice in sorted(listed, key=lambda pair: pair[0])[:MAX_CHANGES]]


def _ranked_advice(change: str, seconds: float, peak: int, now: Explanation) -> tuple[tuple[int, float], Advice] | None:
    """(sort key, advice); None where the change does not help enough."""
    time = seconds / now.time.step_s
    memory = peak / now.peak_bytes
    gain = f"step {_percent(time)}, peak {_percent(memory)} ({peak / 1e9:.1f} GB)"
    fits = peak < now.machine_memory_bytes * now.peak_bytes / (now.device_bytes or now.peak_bytes)
    if not now.fits:
        if memory > 1 - MIN_SAVING:
            return None
        key = (0 if fits else 1, time if fits else memory)
        return key, Advice(change, gain + ("; then it fits" if fits else "; still too large"), seconds, peak)
    if not fits or (time > 1 - MIN_SAVING and (memory > 0.8 or time > 1.1)):
        return None
    return (2 if time <= 1 - MIN_SAVING else 3, time), Advice(change, gain, seconds, peak)


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.0f}%"


def outcome_of(subject: Subject, setting: Setting, machine: Machine) -> tuple[float, int] | None:
    """(estimated seconds, largest peak); None where the setting is refused."""
    try:
        check(subject, setting)
        _, memories, time = measure(subject, setting, machine, by_segment=False, walks=False)
    except ParallelizeError:
        return None
    return time.step_s, max(memory.peak for memory in memories)


def changes(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """(options of the command line, setting) of single changes that keep the tokens of a step."""
    has_tp = setting.size("tp") > 1
    options: list[tuple[str, dict[str, Any]]] = []
    if has_tp and not setting.sequence_parallel:
        options.append(("--sequence-parallel", {"sequence_parallel": True}))
    if has_tp and not setting.loss_parallel:
        options.append(("--loss-parallel", {"loss_parallel": True}))
    if has_tp and not setting.sequence_parallel and not setting.loss_parallel:
        options.append(("--sequence-parallel --loss-parallel", {"sequence_parallel": True, "loss_parallel": True}))
    if setting.size(setting.shard_axis) > 1:
        options += [(f"--zero {stage}", {"zero": stage}) for stage in (1, 2, 3) if stage != setting.zero]
    if setting.recompute == "off":
        options.append(("--recompute full", {"recompute": "full"}))
        options.append(("--recompute selective", {"recompute": "selective"}))
    else:
        options.append(("--recompute off", {"recompute": "off"}))
    if setting.dtype is None and setting.weights_dtype == "float32":
        options.append(("--dtype bfloat16", {"dtype": "bfloat16"}))
    if has_tp and setting.overlap == "off":
        options.append(("--overlap auto", {"overlap": "auto"}))
    if setting.microbatch_size > 1:
        options.append((f"--num-microbatches {setting.batch}", {"num_microbatches": setting.batch}))
    if setting.size("pp") > 1 and setting.schedule == "1f1b":
        options.append(("--schedule interleaved_1f1b", {"schedule": "interleaved_1f1b"}))
        options.append(("--schedule zbv", {"schedule": "zbv"}))
    for text, change in options:
        yield text, replace(setting, **change)
