"""An estimate of a step's time: rooflines of ops, links' speeds, the schedule's bubble. Arithmetic.

Two bounds. *In turn*: nothing hides anything. *Overlapped*: what can run beside compute does, perfectly: messages between
stages, sums over data axes beside the last backward, ZeRO 3's gathers beside everything; and over tp where the plan's linears
are overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallelize.analysis.machine import Machine
from parallelize.analysis.memory import RankMemory
from parallelize.analysis.records import Message, Segment
from parallelize.analysis.setting import Setting
from parallelize.analysis.step import RankStep
from parallelize.pipeline.schedules import Schedule
from parallelize.pipeline.timeline import Costs, Timeline, simulate


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch in one stage: compute, and messages over tp, forward and backward."""

    forward_compute_s: float
    forward_messages_s: float
    backward_compute_s: float
    backward_messages_s: float
    flops: float
    inputs_share: float = 0.5  # of backward, that is done by the first half where it is split

    def forward_s(self, overlapped: bool) -> float:
        return _both(self.forward_compute_s, self.forward_messages_s, overlapped)

    def backward_s(self, overlapped: bool) -> float:
        return _both(self.backward_compute_s, self.backward_messages_s, overlapped)


def _both(compute: float, messages: float, overlapped: bool) -> float:
    return max(compute, messages) if overlapped else compute + messages


@dataclass(frozen=True)
class StepTime:
    """An estimate.

    Attributes:
        in_turn_s, overlapped_s: bounds of the step. data_s, optimizer_s: parts of it, of the slowest rank. timeline: the
            pipeline of the first bound. flops: of one step on the busiest rank. mfu: model operations over what all devices
            could do in the time, for each bound.
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
    """One microbatch of one stage."""
    setting = step.setting
    dtype = setting.dtype or setting.weights_dtype
    found = step.segments(stage, later=True)
    sides = [
        (_compute(side, machine, dtype), _messages(side, machine, setting)) for side in (found.forward, found.backward)
    ]
    flops = sum(segment.flops for segment in (*found.forward, *found.backward))
    first, second = _compute(found.inputs, machine, dtype), _compute(found.weights, machine, dtype)
    return StageTime(*sides[0], *sides[1], flops, first / max(first + second, 1e-30))


def _compute(segments: Sequence[Segment], machine: Machine, dtype: str) -> float:
    return sum(machine.kernel_s(kernel, dtype) for segment in segments for kernel in segment.kernels)


def _messages(segments: Sequence[Segment], machine: Machine, setting: Setting) -> float:
    return sum(machine.message_s(message, setting.mesh) for segment in segments for message in segment.messages)


def step_time(
    setting: Setting,
    schedule: Schedule,
    stages: Sequence[StageTime],
    steps: Sequence[RankStep],
    memories: Sequence[RankMemory],
    machine: Machine,
    model_flops: float,
) -> StepTime:
    """Of stages' times, the data axes' messages and the optimiser's traffic, of the ranks that were looked at.

    Args:
        model_flops: of the unsharded model for one step's tokens, without recompute.
    """
    overlaps_tp = setting.overlap != "off"
    send = max((machine.message_s(message, setting.mesh) for step in steps for message in _sends(step)), default=0.0)
    in_turn = _pipeline(schedule, stages, send, False)
    beside = _pipeline(schedule, stages, 0.0, overlaps_tp)
    gathers, sums = zip(*(_data(step, machine) for step in steps), strict=True)
    data, hidden = (
        max(map(sum, zip(gathers, sums, strict=True))),
        _left_over(setting, stages, max(gathers), max(sums), beside),
    )
    optimizer = max(_optimizer_s(memory, machine) for memory in memories)
    first, second = in_turn.makespan + data + optimizer, beside.makespan + hidden + optimizer
    peak = machine.peak_flops[setting.dtype or setting.weights_dtype] * setting.mesh.world_size
    busiest = max(
        sum(stages[stage].flops for stage in range(schedule.num_stages) if schedule.stage_ranks[stage] == rank)
        for rank in range(schedule.num_ranks)
    )
    return StepTime(
        first,
        second,
        in_turn.makespan,
        data,
        optimizer,
        in_turn.bubble_fraction,
        busiest * setting.microbatches,
        setting.tokens / second,
        model_flops / (first * peak),
        model_flops / (second * peak),
        in_turn,
    )


def _pipeline(schedule: Schedule, stages: Sequence[StageTime], send: float, overlapped: bool) -> Timeline:
    forward = [stage.forward_s(overlapped) for stage in stages]
    backward = [stage.backward_s(overlapped) for stage in stages]
    inputs = [stage.backward_s(overlapped) * stage.inputs_share for stage in stages]
    return simulate(schedule, Costs(forward, backward, inputs, send=send))


def _sends(step: RankStep) -> list[Message]:
    return [message for message, _ in step.messages if message.op == "send" and message.axis == "pp"]


def _data(step: RankStep, machine: Machine) -> tuple[float, float]:
    """Seconds a step of (ZeRO 3's gathers, sums and everything else) over data axes."""
    gathers = sums = 0.0
    for message, times in step.messages:
        attention = message.axis == "cp" and message.op in ("send", "all_to_all")  # told with the layers' messages
        if attention or not _over_data(message, step.setting):
            continue
        seconds = machine.message_s(message, step.setting.mesh) * times
        if message.op == "all_gather" and message.phase != "step":
            gathers += seconds
        else:
            sums += seconds
    return gathers, sums


def _over_data(message: Message, setting: Setting) -> bool:
    """Whether a group lies along data axes; along all of a mesh that has no others it is called the world."""
    if message.axis == "world":
        return setting.size(*setting.data_axes) == setting.mesh.world_size
    return set(message.axis.split("*")) <= set(setting.data_axes)


def _left_over(setting: Setting, stages: Sequence[StageTime], gathers: float, sums: float, beside: Timeline) -> float:
    """What compute cannot hide: sums have the last backward of a step (all of them under ZeRO 2 and 3), gathers all of it."""
    last = max(stage.backward_compute_s for stage in stages)
    times = setting.microbatches if setting.zero in (2, 3) and not setting.defer else 1
    return max(0.0, sums - last * times) + max(0.0, gathers - beside.makespan)


def _optimizer_s(memory: RankMemory, machine: Machine) -> float:
    """Every byte of weights, gradients and state read, all but gradients written."""
    moved = 2 * memory.parameters + memory.gradients + 2 * memory.optimizer
    return moved / (machine.memory_bytes_per_s * machine.memory_efficiency)
