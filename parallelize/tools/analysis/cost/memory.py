"""Bytes that a rank stores over a step: what stays, and what is allocated and freed as the schedule runs. Arithmetic.

What stays (parameters, gradients, optimizer state) is counted by `plan/parameter_shards.py`. The rest are the recorded
changes of each segment, in the order of the rank's actions. Under ZeRO 2, communication buffers are counted at their
largest; under ZeRO 3 as units run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from parallelize.axes.pipeline.schedules import Action
from parallelize.axes.pipeline.step_runner import AHEAD
from parallelize.axes.pipeline.timeline import Receive, Send
from parallelize.plan.parameter_shards import ParameterShard, stored_elements, zero_groups
from parallelize.tools.analysis.cost.curves import Curve, GatheredUnits, curve_of, curves_of, gathered_bytes, joined
from parallelize.tools.analysis.cost.data_axes import MOMENTUM_BYTES, gathered_after_step
from parallelize.tools.analysis.cost.in_flight import has_closed_form, stages_in_flight
from parallelize.tools.analysis.cost.setting import ITEM_BYTES, STATE_BYTES, Setting
from parallelize.tools.analysis.cost.stored_gradients import SplitGradients, is_buffered, pool_bytes
from parallelize.tools.analysis.cost.systems import OWN
from parallelize.tools.analysis.cost.training_step import RankStep, receives_early
from parallelize.tools.analysis.record.constants import constant


class StoredBytes(NamedTuple):
    """Bytes that a rank stores over a step."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Moment:
    """One segment of one action: bytes before it, at its peak, and after it. All that comes and goes in a step counts:
    activations, new gradients, and what ZeRO 3 gathers."""

    action: str
    unit: str
    before: int
    peak: int
    after: int


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        parameters, optimizer: stored over all steps. gradients: stored from the first backward on.
        activations: their peak, with the tensors that travel between stages.
        buffers: communication buffers, the largest sum at any time.
        peak: the largest sum of everything. peak_at: its action and unit.
        moments: the step in order.
        fixed_gradients, fixed_buffers: what of the gradients and buffers is allocated over the whole step.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    peak: int
    peak_at: str
    moments: tuple[Moment, ...] = ()
    fixed_gradients: int = 0
    fixed_buffers: int = 0


def _new_gradients(step: RankStep) -> int:
    """Gradients that the first microbatch of each stage allocates: in backward, or in forward with a fused loss.

    (The gradient of a tied weight's other copy is not among them.)
    """
    stages = [step.segments(stage, later=False) for stage in step.local_stages]
    segments = [segment for stage in stages for segment in (*stage.forward, *stage.backward)]
    return sum(change.gradients for segment in segments for change in segment.changes)


def memory_of(step: RankStep, by_segment: bool = True, walks: bool = True) -> RankMemory:
    """The memory of the rank of `step`.

    Args:
        by_segment: one moment per segment; else one per action.
        walks: go through all actions; else, where the schedule has a closed form, through one microbatch, with as many
            others as wait (no moments).
    """
    setting, shards = step.setting, step.shards
    without_gradient = {shard.name for shard in shards if not step.has_gradient(shard.name)}
    parameters, gradients, optimizer = stored_bytes(shards, setting, step.owned.matrices, without_gradient)
    optimizer += 0 if setting.offload_state else step.owned.state_bytes
    fixed = _fixed_gradients(step, gradients)
    pool = pool_bytes(shards, setting)
    walk: _MemoryWalk | _MicrobatchWalk
    if walks or not _has_arithmetic(setting):
        walk = _MemoryWalk(step, by_segment)
    else:
        walk = _MicrobatchWalk(step, gradients - fixed)
    moments = tuple(walk.moments())
    top = max(moments, key=lambda moment: moment.peak, default=Moment("", "", 0, 0, 0))
    at_end = gradients - fixed
    most = max(
        top.peak + pool,
        walk.finished + pool,
        at_end + max(pool, step.owned.buffer_bytes),
        at_end + pool + max(_stepped(shards, setting), gathered_after_step(shards, setting)),
        at_end + _end_of_backward(shards, setting),
    )
    return RankMemory(
        parameters,
        gradients,
        optimizer,
        walk.peak_activations,
        pool + max(walk.peak_with_units - walk.peak_activations, 0),
        parameters + optimizer + fixed + most,
        f"{top.action} {top.unit}".strip(),
        moments,
        fixed,
        pool,
    )


def _fixed_gradients(step: RankStep, gradients: int) -> int:
    """Bytes of the gradients that are stored before the first backward. gradients: bytes after the last one."""
    setting = step.setting
    if is_buffered(setting):
        return gradients
    if setting.splits_gradients:
        whole = [shard for shard in step.shards if shard.trained and shard.splits.gradient == 1]
        return sum(shard.numel + 1 for shard in whole) * setting.gradient_bytes if setting.zero == 2 else 0
    return 0 if setting.zero == 3 else gradients - _new_gradients(step)


def _stepped(shards: Sequence[ParameterShard], setting: Setting) -> int:
    """What the optimizer's step allocates, when activations are freed."""
    per_element = setting.training_system.step_bytes
    if setting.system == OWN:
        per_element = _ROOTS_BYTES if setting.optimizer in ("adamw", "adam") and setting.transport == "nccl" else 0
    return int(_optimizer_elements(shards, setting) * per_element)


_ROOTS_BYTES = 4
"""PyTorch's Adam steps the parameters of a GPU all at once by default, and stores a square root for each element of
them meanwhile. Source: torch.optim.AdamW, `foreach`."""

RESERVED_MOST = 0.05
"""Of a device's memory, the most that a context and libraries are taken to need: small ones have small workspaces."""


def device_bytes(tensors: float, setting: Setting, memory_bytes: float, *, at_limit: bool = False) -> float:
    """The memory of a device that a rank takes: its tensors, what the allocator holds beside them, and the context and
    libraries.

    Args:
        memory_bytes: of the device. at_limit: the least that it can do with: the allocator frees what it holds before
            it gives up.
    """
    system = setting.training_system
    beside = system.fragmentation * (constant("fragmentation_limit") if at_limit else 1.0)
    return tensors * (1 + beside) + min(system.reserve, RESERVED_MOST * memory_bytes)


def _has_arithmetic(setting: Setting) -> bool:
    has_steady_gradients = setting.uses_reducer or setting.zero == 3
    return has_closed_form(setting.schedule) and has_steady_gradients and setting.transport != "gloo"


class _MicrobatchWalk:
    """The peaks of a rank from one microbatch in each of its stages, beside those that wait.

    Args:
        new_gradients: bytes of gradients that a step makes. They are there at every moment but those of a step whose
            microbatches all wait for the first backward.
    """

    def __init__(self, step: RankStep, new_gradients: int):
        setting, ranks = step.setting, step.setting.size("pp")
        units = GatheredUnits(step.shards, setting) if setting.zero == 3 and setting.splits_gradients else None
        waiting = stages_in_flight(ranks, len(step.local_stages), setting.step_microbatches, step.pp_rank)
        actions = [step.segments(stage, later=True) for stage in step.local_stages]
        nets = [sum(curve_of(segment).net for segment in action.forward) for action in actions]
        waiting_bytes = sum(count * nets[index] for index, count in waiting.items())
        is_steady = waiting.total() < setting.step_microbatches * len(step.local_stages)
        stored = new_gradients if is_steady else 0
        self.peak_activations, self.peak_with_units, self.finished = waiting_bytes, 0, new_gradients
        self.top = Moment("", "", 0, waiting_bytes + stored, 0)
        for index, (stage, action) in enumerate(zip(step.local_stages, actions, strict=True)):
            for kind, segments, before in (
                ("F", action.forward, waiting_bytes - nets[index]),
                ("B", action.backward, waiting_bytes),
            ):
                curves = curves_of(segments, units, is_backward=kind == "B")
                if units is not None:
                    self.peak_with_units = max(self.peak_with_units, before + joined(curves)[1].peak_all)
                else:  # gradients are added to those of earlier microbatches
                    curves = [(unit, replace(curve, net_all=curve.net, peak_all=curve.peak)) for unit, curve in curves]
                self.peak_activations = max(self.peak_activations, before + joined(curves)[1].peak)
                if kind == "B" and not is_steady:
                    curves = _with_rows(curves, new_gradients)
                unit, curve = joined(curves)
                if before + stored + curve.peak_all > self.top.peak:
                    now = before + stored
                    self.top = Moment(f"{stage}{kind}", unit, now, now + curve.peak_all, now + curve.net_all)

    def moments(self) -> Iterator[Moment]:
        """The highest one."""
        yield self.top


def _with_rows(curves: Sequence[tuple[str, Curve]], total: int) -> list[tuple[str, Curve]]:
    """Curves of the units of a backward, each of which leaves an equal part of `total` bytes."""
    part = total // max(len(curves), 1)
    return [(unit, replace(curve, net_all=curve.net_all + part)) for unit, curve in curves]


class _MemoryWalk:
    """Adds up a rank's changes, action by action.

    Attributes:
        peak_activations: of activations alone. peak_with_units: and of what ZeRO 3 gathers.
        finished: the most bytes of gradients that come and go as what is left of them is reduced.
    """

    def __init__(self, step: RankStep, by_segment: bool):
        self.step, self.by_segment = step, by_segment
        self.peak_activations = self.peak_with_units = self.finished = 0
        self._known: dict[tuple[int, str, bool], list[tuple[str, Curve]]] = {}
        self._completing = "BI" if step.split_trace is None else "BW"  # actions that complete a microbatch's gradients
        self._gloo = step.setting.transport == "gloo"  # it does not report that a message was sent, so tensors stay
        self._last_sent_back = 0  # bytes of the gradient that was sent last
        self._begun: set[int] = set()  # stages that have run a backward
        self._buffered = is_buffered(step.setting)
        self._split = SplitGradients(step) if step.setting.splits_gradients else None
        gathers = step.setting.zero == 3 and self._split is not None
        self._units = GatheredUnits(step.shards, step.setting) if gathers else None

    def moments(self) -> Iterator[Moment]:
        steps = self.step.steps
        early = receives_early(steps, AHEAD if self._gloo else 0)
        activations = gradients = 0
        for index, action in enumerate(steps):
            activations += sum(self._received(receive) for receive in early.get(index, ()))
            activations -= self._sent(action) if isinstance(action, Send) else 0
            if not isinstance(action, Action):
                continue
            curves = self._curves_of(action)
            stored = (
                [gradients] if self._split is None else self._split.before_each(action, [unit for unit, _ in curves])
            )
            moments = list(self._moments_of(action, curves, stored, activations))
            yield from moments if self.by_segment or not moments else [_highest(moments)]
            activations += sum(curve.net for _, curve in curves)
            gradients += sum(curve.net_all - curve.net for _, curve in curves)
            if action.kind in self._completing:
                activations -= self._freed_outputs(action.stage)
        if self._split is not None:
            self.finished = self._split.finish()

    def _moments_of(
        self, action: Action, curves: Sequence[tuple[str, Curve]], stored: Sequence[int], activations: int
    ) -> Iterator[Moment]:
        """The moments of an action. stored: bytes of gradients before each unit, or, where its curve has them, before
        the first one."""
        gradients = stored[0] if stored else 0
        for n, (unit, curve) in enumerate(curves):
            self.peak_activations = max(self.peak_activations, activations + curve.peak)
            if self._units is not None:
                self.peak_with_units = max(self.peak_with_units, activations + curve.peak_all)
            before = activations + gradients
            activations += curve.net
            if self._split is None:
                gradients += curve.net_all - curve.net
            else:
                gradients = stored[n + 1] if n + 1 < len(stored) else self._split.stored
            yield Moment(str(action), unit, before, before + curve.peak_all, activations + gradients)

    def _sent(self, send: Send) -> int:
        """Bytes freed by a send: the gradient that was sent back before has arrived by now."""
        if send.direction == "F" or self._gloo:
            return 0
        freed, self._last_sent_back = self._last_sent_back, self.step.boundary(send.stage).backward_bytes
        return freed

    def _freed_outputs(self, stage: int) -> int:
        """Bytes of the outputs that a stage sent to another rank, which it stores until its own backward."""
        receiver = stage + 1
        sent_away = receiver < self.step.schedule.num_stages and receiver not in self.step.local_stages
        return self.step.boundary(receiver).forward_bytes if sent_away and not self._gloo else 0

    def _curves_of(self, action: Action) -> list[tuple[str, Curve]]:
        """(unit, curve) of what an action runs; computed once for equal actions."""
        later = self._units is None and (self._buffered or (self._split is None and action.stage in self._begun))
        if action.kind in self._completing:
            self._begun.add(action.stage)
        key = (action.stage, action.kind, later)
        if key not in self._known:
            segments = self.step.segments(action.stage, later).of(action.kind)
            curves = curves_of(segments, self._units, is_backward=action.kind != "F")
            joins = not self.by_segment and self._split is None
            self._known[key] = [joined(curves)] if joins else curves
        return self._known[key]

    def _received(self, receive: Receive) -> int:
        boundary = self.step.boundary(receive.stage + (receive.direction == "B"))
        return boundary.forward_bytes if receive.direction == "F" else boundary.backward_bytes


def _highest(moments: Sequence[Moment]) -> Moment:
    """One moment for all of an action, with the unit where it is highest."""
    top = max(moments, key=lambda moment: moment.peak)
    return replace(top, before=moments[0].before, after=moments[-1].after)


def stored_bytes(
    shards: Sequence[ParameterShard],
    setting: Setting,
    matrices: Collection[str] = frozenset(),
    without_gradient: Collection[str] = frozenset(),
) -> StoredBytes:
    """Parameters, gradients and optimizer state.

    Stage 3 stores parameters in the weights' dtype where compute is narrower; the others store what they compute with,
    and step float32 copies where that is narrower.

    Args:
        matrices: names of parameters that Muon steps as matrices.
        without_gradient: names of parameters that no backward reaches: an optimizer makes no state for them.
    """
    elements = stored_elements(shards, setting.zero, counts_gradients=setting.uses_reducer)
    codes = [shard for shard in shards if shard.code_bytes]
    code_bytes = sum(shard.padded_numel(shard.splits.parameter) * shard.code_bytes for shard in codes)
    values = elements.parameters - sum(shard.padded_numel(shard.splits.parameter) for shard in codes)
    narrows = setting.zero == 3 and setting.low_precision
    item = ITEM_BYTES[setting.weights_dtype] if narrows else setting.compute_bytes
    copies = elements.optimizer * (4 if setting.low_precision and setting.zero < 3 else 0)
    stepped = [shard for shard in shards if shard.name not in without_gradient]
    state = 0 if setting.offload_state else _state_bytes(stepped, setting, matrices)
    return StoredBytes(values * item + code_bytes, elements.gradients * setting.gradient_bytes, copies + state)


def _state_bytes(shards: Sequence[ParameterShard], setting: Setting, matrices: Collection[str]) -> int:
    stepped_item = setting.stepped_bytes
    state = _optimizer_elements(shards, setting) * (STATE_BYTES[setting.optimizer] * stepped_item // 4)
    if matrices:
        of_matrices = _optimizer_elements([shard for shard in shards if shard.name in matrices], setting)
        state -= of_matrices * (STATE_BYTES[setting.optimizer] - MOMENTUM_BYTES) * stepped_item // 4
    return state


def _optimizer_elements(shards: Sequence[ParameterShard], setting: Setting) -> int:
    return stored_elements(shards, setting.zero, counts_gradients=False).optimizer


def _end_of_backward(shards: Sequence[ParameterShard], setting: Setting) -> int:
    """ZeRO 3, when activations are freed: a gathered group, its full gradients, and the buffer of their
    reduce-scatter."""
    if setting.zero != 3 or setting.shard_ranks == 1:
        return 0
    item, groups = 2 * setting.compute_bytes + setting.gradient_bytes, zero_groups(shards).values()
    return max((gathered_bytes(group, setting, item, times_of_codes=2) for group in groups), default=0)
