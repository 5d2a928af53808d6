"""An estimate of a step's time: rooflines of ops, bandwidth of links, the schedule's bubble. Arithmetic.

Two bounds. *Sequential*: nothing is overlapped. *Overlapped*: everything that can run while compute runs does, and is
hidden completely: messages between stages, reductions over data axes during the last backward, ZeRO 3's gathers at any
time, and messages over tp where the plan's linears are overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelize.axes.pipeline.schedules import Schedule
from parallelize.axes.pipeline.timeline import Costs, Timeline, simulate
from parallelize.tools.analysis.cost.machine import Machine
from parallelize.tools.analysis.cost.memory import RankMemory
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.cost.training_step import RankStep
from parallelize.tools.analysis.record.trace_data import Message, Segment


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch in one stage: compute, and messages over tp. dgrad_fraction: dgrad's part of
    backward."""

    forward_compute_s: float
    forward_messages_s: float
    backward_compute_s: float
    backward_messages_s: float
    flops: float
    dgrad_fraction: float = 0.5

    def forward_s(self, overlapped: bool) -> float:
        return _combined(self.forward_compute_s, self.forward_messages_s, overlapped)

    def backward_s(self, overlapped: bool) -> float:
        return _combined(self.backward_compute_s, self.backward_messages_s, overlapped)


def _combined(compute_s: float, messages_s: float, overlapped: bool) -> float:
    return max(compute_s, messages_s) if overlapped else compute_s + messages_s


@dataclass(frozen=True)
class StepTime:
    """An estimate. Its fields are keys of the JSON output.

    Attributes:
        in_turn_s, overlapped_s: the sequential and the overlapped bound of a step.
        pipeline_s, data_s, optimizer_s: parts of the sequential bound: the pipeline, messages over data axes, and the
            optimizer of the slowest rank.
        bubble_fraction, timeline: bubble fraction and timeline of the pipeline, for the sequential bound.
        flops: floating-point operations of one step on the rank with the most.
        tokens_per_s: tokens per second of all ranks, for the overlapped bound.
        mfu_in_turn, mfu_overlapped: the model's operations over what all devices could do in the time, for each bound.
    """

    in_turn_s: float
    overlapped_s: float
    pipeline_s: float
    data_s: float
    optimizer_s: float
    bubble_fraction: float
    flops: float
    tokens_per_s: float
    mfu_in_turn: float
    mfu_overlapped: float
    timeline: Timeline


def stage_time(step: RankStep, stage: int, machine: Machine) -> StageTime:
    """The time of one microbatch in one stage."""
    setting = step.setting
    dtype = setting.dtype or setting.weights_dtype
    segments = step.segments(stage, later=True)
    dgrad_s, wgrad_s = _compute_s(segments.dgrad, machine, dtype), _compute_s(segments.wgrad, machine, dtype)
    return StageTime(
        forward_compute_s=_compute_s(segments.forward, machine, dtype),
        forward_messages_s=_messages_s(segments.forward, machine, setting),
        backward_compute_s=_compute_s(segments.backward, machine, dtype),
        backward_messages_s=_messages_s(segments.backward, machine, setting),
        flops=sum(segment.flops for segment in (*segments.forward, *segments.backward)),
        dgrad_fraction=dgrad_s / max(dgrad_s + wgrad_s, 1e-30),
    )


def _compute_s(segments: Sequence[Segment], machine: Machine, dtype: str) -> float:
    return sum(machine.kernel_s(kernel, dtype) for segment in segments for kernel in segment.kernels)


def _messages_s(segments: Sequence[Segment], machine: Machine, setting: Setting) -> float:
    return sum(
        machine.message_s(message, setting.mesh_of(message.axis))
        for segment in segments
        for message in segment.messages
    )


def step_time(
    setting: Setting,
    schedule: Schedule,
    machine: Machine,
    *,
    stages: Sequence[StageTime],
    steps: Sequence[RankStep],
    memories: Sequence[RankMemory],
    model_flops: float,
) -> StepTime:
    """The time of a step.

    Args:
        stages: times of all stages of the schedule.
        steps, memories: steps and memory of the ranks whose messages and traffic are considered; the slowest rank
            counts.
        model_flops: floating-point operations of the unsharded model for one step's tokens, without recompute.
    """
    overlaps_tp = setting.overlap != "off"
    send_s = max(
        (machine.message_s(message, setting.mesh_of(message.axis)) for step in steps for message in _sends(step)),
        default=0.0,
    )
    sequential = _pipeline(schedule, stages, send_s, overlapped=False)
    overlapped = _pipeline(schedule, stages, 0.0, overlapped=overlaps_tp)
    data = [_data_s(step, machine) for step in steps]
    data_s = max(gathers + reductions for gathers, reductions in data)
    gathers_s, reductions_s = (max(seconds) for seconds in zip(*data, strict=True))
    exposed_s = _exposed_reductions_s(setting, stages, reductions_s) + max(0.0, gathers_s - overlapped.makespan)
    optimizer_s = max(_optimizer_s(memory, machine) for memory in memories)
    sequential_s = sequential.makespan + data_s + optimizer_s
    overlapped_s = overlapped.makespan + exposed_s + optimizer_s
    peak_flops = machine.peak_flops[setting.dtype or setting.weights_dtype] * setting.mesh.world_size
    most_flops = max(
        sum(stages[stage].flops for stage in range(schedule.num_stages) if schedule.stage_ranks[stage] == rank)
        for rank in range(schedule.num_ranks)
    )
    return StepTime(
        in_turn_s=sequential_s,
        overlapped_s=overlapped_s,
        pipeline_s=sequential.makespan,
        data_s=data_s,
        optimizer_s=optimizer_s,
        bubble_fraction=sequential.bubble_fraction,
        flops=most_flops * setting.step_microbatches,
        tokens_per_s=setting.tokens / overlapped_s,
        mfu_in_turn=model_flops / (sequential_s * peak_flops),
        mfu_overlapped=model_flops / (overlapped_s * peak_flops),
        timeline=sequential,
    )


def _pipeline(schedule: Schedule, stages: Sequence[StageTime], send_s: float, *, overlapped: bool) -> Timeline:
    forward = [stage.forward_s(overlapped) for stage in stages]
    backward = [stage.backward_s(overlapped) for stage in stages]
    dgrad = [stage.backward_s(overlapped) * stage.dgrad_fraction for stage in stages]
    return simulate(schedule, Costs(forward, backward, dgrad, send=send_s))


def _sends(step: RankStep) -> list[Message]:
    return [message for message, _ in step.messages if message.op == "send" and message.axis == "pp"]


def _data_s(step: RankStep, machine: Machine) -> tuple[float, float]:
    """Seconds per step over data axes: (gathers of ZeRO 3, everything else)."""
    gathers = reductions = 0.0
    for message, times in step.messages:
        in_layers = message.axis == "cp" and message.op in ("send", "all_to_all")  # attention: in the stages' times
        if in_layers or not _is_over_data_axes(message, step.setting):
            continue
        seconds = machine.message_s(message, step.setting.mesh_of(message.axis)) * times
        if message.op == "all_gather" and message.phase != "step":
            gathers += seconds
        else:
            reductions += seconds
    return gathers, reductions


def _is_over_data_axes(message: Message, setting: Setting) -> bool:
    """Whether a group is along data axes. The axis is "world" where the mesh has no other axes."""
    if message.axis == "world":
        return setting.size(*setting.data_axes) == setting.mesh.world_size
    return set(message.axis.split("*")) <= {*setting.data_axes, "edp"}


def _exposed_reductions_s(setting: Setting, stages: Sequence[StageTime], reductions_s: float) -> float:
    """What compute cannot hide of the reductions. They overlap the last backward of a step; all backwards where ZeRO 2
    or 3 reduces in each."""
    backward_s = max(stage.backward_compute_s for stage in stages)
    num_backwards = setting.step_microbatches if setting.zero in (2, 3) and not setting.defer else 1
    return max(0.0, reductions_s - backward_s * num_backwards)


def _optimizer_s(memory: RankMemory, machine: Machine) -> float:
    """The optimizer reads weights, gradients and state, and writes weights and state."""
    moved = 2 * memory.parameters + memory.gradients + 2 * memory.optimizer
    return moved / (machine.memory_bytes_per_s * machine.memory_efficiency)
