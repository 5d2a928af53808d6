"""An estimate of a step's time: ops at the rates that they reach, messages at those of links, the schedule's bubble.
Arithmetic.

Beside the estimate stand two bounds. *Sequential*: nothing is overlapped. *Overlapped*: everything that can run while
compute runs does, and is hidden completely: messages between stages, reductions over data axes during the last
backward, ZeRO 3's gathers at any time, and messages over tp where the plan's linears are overlapped. In the estimate,
what a system hides still takes a part of its time from compute (the constants `contention.*`: kernels of messages take
multiprocessors and memory bandwidth), and messages between stages are waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from parallelize.axes.pipeline.schedules import Schedule
from parallelize.axes.pipeline.timeline import Costs, Timeline, simulate
from parallelize.tools.analysis.cost.in_flight import has_closed_form, pipeline_s
from parallelize.tools.analysis.cost.machine import Machine
from parallelize.tools.analysis.cost.memory import RankMemory
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.cost.training_step import MessageTotals, RankStep
from parallelize.tools.analysis.record.constants import constant
from parallelize.tools.analysis.record.kernel_sets import kernel_set
from parallelize.tools.analysis.record.trace_data import Totals


@dataclass(frozen=True)
class StageTime:
    """Seconds of one microbatch in one stage: of ops on the device, of messages over tp, cp and ep, and of the host
    that launches both. dgrad_fraction: dgrad's part of backward.

    forward_ring_s, backward_ring_s: keys and values around the ring of cp, of which attention hides a part."""

    forward_device_s: float
    forward_messages_s: float
    forward_host_s: float
    backward_device_s: float
    backward_messages_s: float
    backward_host_s: float
    flops: float
    dgrad_fraction: float = 0.5
    forward_ring_s: float = 0.0
    backward_ring_s: float = 0.0

    def forward_s(self, overlapped: bool) -> float:
        device_s = _combined(self.forward_device_s, self.forward_messages_s, overlapped) + self.forward_ring_s
        return _with_host(device_s, self.forward_host_s)

    def backward_s(self, overlapped: bool) -> float:
        device_s = _combined(self.backward_device_s, self.backward_messages_s, overlapped) + self.backward_ring_s
        return _with_host(device_s, self.backward_host_s)

    @property
    def hidden_s(self) -> float:
        """Of messages that run behind compute, or of compute behind messages, where they overlap."""
        return min(self.forward_device_s, self.forward_messages_s) + min(
            self.backward_device_s, self.backward_messages_s
        )

    @property
    def backward_compute_s(self) -> float:
        """Without messages."""
        return _with_host(self.backward_device_s, self.backward_host_s)

    @property
    def compute_s(self) -> float:
        """Of forward and backward, without messages."""
        return _with_host(self.forward_device_s, self.forward_host_s) + self.backward_compute_s


def _combined(compute_s: float, messages_s: float, overlapped: bool) -> float:
    return max(compute_s, messages_s) if overlapped else compute_s + messages_s


def _with_host(device_s: float, host_s: float) -> float:
    """The device runs ops while the host launches the next ones. The slower of both counts, and where they are about as
    slow more than that: short ops wait for their launch while long ones keep the host ahead."""
    power = constant("host_power")
    return (device_s**power + host_s**power) ** (1 / power)


@dataclass(frozen=True)
class StepTime:
    """An estimate. Its fields are keys of the JSON output.

    Attributes:
        step_s: the estimate.
        least_s: what no schedule on this mesh goes below: the matmuls of the rank with the most at the rate that large
            ones reach, or its messages at the rates of their links, whichever takes longer.
        in_turn_s, overlapped_s: the sequential and the overlapped bound of a step.
        pipeline_s, data_s, optimizer_s: parts of the sequential bound: the pipeline, messages over data axes, and the
            optimizer of the slowest rank.
        bubble_fraction, timeline: bubble fraction and timeline of the pipeline, for the sequential bound; empty where
            the pipeline was not simulated.
        flops: floating-point operations of one step on the rank with the most.
        tokens_per_s: tokens per second of all ranks, for the estimate.
        mfu, mfu_in_turn, mfu_overlapped: the model's operations over what all devices could do in the time, for the
            estimate and for each bound.
        parts: name -> seconds, whose sum is `step_s`.
    """

    step_s: float
    least_s: float
    in_turn_s: float
    overlapped_s: float
    pipeline_s: float
    data_s: float
    optimizer_s: float
    bubble_fraction: float
    flops: float
    tokens_per_s: float
    mfu: float
    mfu_in_turn: float
    mfu_overlapped: float
    parts: dict[str, float]
    timeline: Timeline


def stage_time(step: RankStep, stage: int, machine: Machine) -> StageTime:
    """The time of one microbatch in one stage."""
    setting, kernels = step.setting, kernel_set(step.setting.kernels)
    forward, backward, dgrad, wgrad = step.totals(stage)
    dtype = setting.dtype or setting.weights_dtype
    hand_over_s = setting.training_system.stage_s if setting.size("pp") > 1 else 0.0
    narrow = "float8" if setting.matmul_dtype == "mxfp8" else setting.matmul_dtype or ""
    device_s = partial(machine.device_s, dtype=dtype, kernels=kernels, narrow=narrow)
    dgrad_s, wgrad_s = device_s(dgrad), device_s(wgrad)

    def ring_s(phase: str, totals: Totals) -> float:
        sends = step.messages_in(stage, phase).get(("send", "cp"), (0.0, 0.0))
        sends_s = _messages_s({("send", "cp"): sends}, machine, setting)
        hidden_s = min(sends_s, machine.attention_s(totals, dtype, kernels) * (1 - 1 / setting.size("cp")))
        return sends_s - hidden_s * (1 - machine.contention(machine.placement(setting.mesh, "cp")))

    return StageTime(
        forward_device_s=device_s(forward),
        forward_messages_s=_in_stage_s(step.messages_in(stage, "forward"), machine, setting),
        forward_host_s=machine.host_s(forward, kernels) + hand_over_s,
        backward_device_s=device_s(backward),
        backward_messages_s=_in_stage_s(step.messages_in(stage, "backward"), machine, setting),
        backward_host_s=machine.host_s(backward, kernels) + hand_over_s,
        flops=step.flops(stage),
        dgrad_fraction=dgrad_s / max(dgrad_s + wgrad_s, 1e-30),
        forward_ring_s=ring_s("forward", forward),
        backward_ring_s=ring_s("backward", backward),
    )


def _messages_s(groups: MessageTotals, machine: Machine, setting: Setting) -> float:
    return sum(
        machine.messages_s(op, machine.placement(setting.mesh_of(axis), axis), sent, times)
        for (op, axis), (sent, times) in groups.items()
        if op != "recv"
    )


def _in_stage_s(groups: MessageTotals, machine: Machine, setting: Setting) -> float:
    """Of messages inside a stage, without those of the ring of cp."""
    return _messages_s({key: value for key, value in groups.items() if key != ("send", "cp")}, machine, setting)


def step_time(
    setting: Setting,
    schedule: Schedule,
    machine: Machine,
    *,
    stages: Sequence[StageTime],
    steps: Sequence[RankStep],
    memories: Sequence[RankMemory],
    model_flops: float,
    simulated: bool = True,
) -> StepTime:
    """The time of a step.

    Args:
        stages: times of all stages of the schedule.
        steps, memories: steps and memory of the ranks whose messages and traffic are considered; the slowest rank
            counts.
        model_flops: floating-point operations of the unsharded model for one step's tokens, without recompute.
        simulated: whether the pipeline is simulated action by action, for its timeline, where it has a closed form.
    """
    overlaps_tp = setting.overlap != "off"
    send_s = max((machine.message_s(message, setting.mesh) for step in steps for message in step.sends), default=0.0)
    simulated = simulated or not has_closed_form(setting.schedule)
    timeline = Timeline(schedule.name, ())
    if simulated:
        timeline = _simulated(schedule, stages, send_s, overlapped=False)
    run = partial(_pipeline_s, schedule, stages, simulated=simulated)
    sequential_s = timeline.makespan if simulated else run(send_s, overlapped=False)
    hidden_s = run(0.0, overlapped=overlaps_tp)
    data = [_data_s(step, machine) for step in steps]
    data_s = max(gathers + reductions for gathers, reductions in data)
    gathers_s, reductions_s = (max(seconds) for seconds in zip(*data, strict=True))
    exposed_s = _exposed_reductions_s(setting, stages, reductions_s) + max(0.0, gathers_s - hidden_s)
    optimizer_s = max(_optimizer_s(memory, machine) for memory in memories)
    parts = _parts(
        setting,
        schedule,
        stages,
        hidden_s,
        machine,
        (gathers_s, reductions_s, max(_copies_s(step, machine) for step in steps)),
        send_s,
        optimizer_s,
    )
    step_s = sum(parts.values())
    in_turn_s, overlapped_s = sequential_s + data_s + optimizer_s, hidden_s + exposed_s + optimizer_s
    peak_flops = machine.peak_flops[setting.dtype or setting.weights_dtype] * setting.mesh.world_size
    most_flops = max(
        sum(stages[stage].flops for stage in range(schedule.num_stages) if schedule.stage_ranks[stage] == rank)
        for rank in range(schedule.num_ranks)
    )
    rate = machine.peak_flops[setting.dtype or setting.weights_dtype] * machine.matmul_efficiency
    least_s = max(most_flops * setting.step_microbatches / rate, data_s, _messages_in_stages_s(schedule, stages))
    return StepTime(
        step_s=step_s,
        least_s=least_s,
        in_turn_s=in_turn_s,
        overlapped_s=overlapped_s,
        pipeline_s=sequential_s,
        data_s=data_s,
        optimizer_s=optimizer_s,
        bubble_fraction=timeline.bubble_fraction,
        flops=most_flops * setting.step_microbatches,
        tokens_per_s=setting.tokens / step_s,
        mfu=model_flops / (step_s * peak_flops),
        mfu_in_turn=model_flops / (in_turn_s * peak_flops),
        mfu_overlapped=model_flops / (overlapped_s * peak_flops),
        parts=parts,
        timeline=timeline,
    )


def _messages_in_stages_s(schedule: Schedule, stages: Sequence[StageTime]) -> float:
    """Seconds of the messages inside the stages of one rank in a step."""
    each = [0.0] * schedule.num_ranks
    for stage, rank in enumerate(schedule.stage_ranks):
        own = stages[stage]
        each[rank] += own.forward_messages_s + own.backward_messages_s
    return max(each) * schedule.num_microbatches


def _parts(
    setting: Setting,
    schedule: Schedule,
    stages: Sequence[StageTime],
    whole_s: float,
    machine: Machine,
    data_s: tuple[float, float, float],
    send_s: float,
    optimizer_s: float,
) -> dict[str, float]:
    """Seconds of the estimate by what they are for.

    whole_s: of the pipeline, without messages between stages. data_s: of gathers, of reductions, and of the copies
    before and after both.
    """
    count, ranks = setting.step_microbatches, schedule.num_ranks
    gathers_s, reductions_s, copies_s = data_s
    over_data = machine.contention(machine.placement(setting.mesh, _data(setting)))
    forward = [stage.forward_s(setting.overlap != "off") for stage in stages]
    backward = [stage.backward_s(setting.overlap != "off") for stage in stages]
    works = [0.0] * ranks
    compute = [0.0] * ranks
    contended = [0.0] * ranks
    for stage, rank in enumerate(schedule.stage_ranks):
        works[rank] += forward[stage] + backward[stage]
        compute[rank] += stages[stage].compute_s
        contended[rank] += stages[stage].hidden_s * constant("contention.tp") if setting.overlap != "off" else 0.0
    busiest = max(range(ranks), key=works.__getitem__)
    compute_s, busy_s = compute[busiest] * count, works[busiest] * count
    sends = 2 * count * (schedule.num_stages // ranks) + 2 * (ranks - 1) if ranks > 1 else 0
    hidden = setting.training_system.hidden
    backwards = count if setting.zero in (2, 3) and not setting.defer else 1
    room_s = max(stage.backward_compute_s for stage in stages) * backwards
    behind_s = min(reductions_s * hidden, room_s)
    exposed_gathers_s = max(0.0, gathers_s + (behind_s if setting.zero == 3 else 0.0) - compute_s)
    return {
        "compute": compute_s,
        "tp, cp and ep": busy_s - compute_s + contended[busiest] * count,
        "pipeline": whole_s - busy_s if ranks > 1 else 0.0,
        "between stages": sends * send_s,
        "gathers": exposed_gathers_s + over_data * min(gathers_s, compute_s) + copies_s,
        "reductions": reductions_s - behind_s + over_data * behind_s,
        "optimizer": optimizer_s * setting.training_system.optimizer,
        "loop": setting.training_system.step_ms * 1e-3,
    }


def _data(setting: Setting) -> str:
    """The axes of one group over data, as the name of their product."""
    return "*".join(setting.data_axes) or setting.shard_axis


def _pipeline_s(
    schedule: Schedule, stages: Sequence[StageTime], send_s: float, *, overlapped: bool, simulated: bool
) -> float:
    if simulated or not has_closed_form(schedule.name):
        return _simulated(schedule, stages, send_s, overlapped=overlapped).makespan
    forward = [stage.forward_s(overlapped) for stage in stages]
    return pipeline_s(schedule, forward, [stage.backward_s(overlapped) for stage in stages], send_s)


def _simulated(schedule: Schedule, stages: Sequence[StageTime], send_s: float, *, overlapped: bool) -> Timeline:
    forward = [stage.forward_s(overlapped) for stage in stages]
    backward = [stage.backward_s(overlapped) for stage in stages]
    dgrad = [stage.backward_s(overlapped) * stage.dgrad_fraction for stage in stages]
    return simulate(schedule, Costs(forward, backward, dgrad, send=send_s))


def _data_s(step: RankStep, machine: Machine) -> tuple[float, float]:
    """Seconds per step over data axes: (gathers of ZeRO 3, everything else)."""
    gathers, reductions = step.messages_over_data
    return _messages_s(gathers, machine, step.setting), _messages_s(reductions, machine, step.setting)


def _copies_s(step: RankStep, machine: Machine) -> float:
    """Seconds per step in which ZeRO 3 copies: what was gathered out of the buffer that it arrived in, gradients into
    the one that is scattered, where they get the dtype of sums."""
    setting = step.setting
    if setting.zero != 3 or not setting.training_system.copied:
        return 0.0
    gathers, reductions = step.messages_over_data
    arrived, scattered = (
        sum(sent for (op, _), (sent, _) in groups.items() if op == name)
        for groups, name in ((gathers, "all_gather"), (reductions, "reduce_scatter"))
    )
    return machine.moved_s(2 * arrived + scattered * (1 + setting.compute_bytes / setting.reduced_bytes))


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
