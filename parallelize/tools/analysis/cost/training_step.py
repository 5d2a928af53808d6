"""A full training step of one rank, built from the segments of one microbatch. Arithmetic.

A rank runs the segments of the units that its stages own, once per microbatch, in the order of the schedule. It also
sends: tensors between stages, gradients over data axes, gradients of tied parameters, pending reductions over tp, and
scalars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parallelize.axes.pipeline.schedules import Action, Schedule
from parallelize.axes.pipeline.timeline import Receive, Step
from parallelize.plan.parameter_shards import ParameterShard
from parallelize.plan.stages import Stages
from parallelize.tools.analysis.cost.data_axes import OwnerSteps, data_messages
from parallelize.tools.analysis.cost.setting import Setting
from parallelize.tools.analysis.record.layer_dedup import ABSENT
from parallelize.tools.analysis.record.trace_data import (
    LAYERS,
    LOSS,
    OUTSIDE,
    MemoryChange,
    Message,
    MicrobatchSegments,
    MicrobatchTrace,
    Segment,
    StageBoundary,
    Totals,
    totals_of,
)

CHECK_BYTES = 64  # of the token count, and the check of ranks: eight int64
SUM_BYTES = 4  # of counts, probabilities and the number of rows: float32
OUTCOME_BYTES = 16  # whether a rank failed, and the loss: two float64


@dataclass(frozen=True)
class StageSegments:
    """What one stage runs for a microbatch. dgrad, wgrad: the two parts of backward, where the schedule splits it."""

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    dgrad: tuple[Segment, ...] = ()
    wgrad: tuple[Segment, ...] = ()

    def of(self, kind: str) -> tuple[Segment, ...]:
        """What an action of that kind runs."""
        return {"F": self.forward, "B": self.backward, "I": self.dgrad, "W": self.wgrad}[kind]


class RankStep:
    """One rank of the pipeline.

    Args:
        stages: None where the model has no layers to split.
        shards: the parameters of this rank.
        split_trace: a trace in which dgrad and wgrad ran apart, where the schedule does that; else None.
        owned: what an optimizer of full matrices or parameters sends; None: it steps each element by itself.
    """

    def __init__(
        self,
        trace: MicrobatchTrace,
        stages: Stages | None,
        setting: Setting,
        schedule: Schedule,
        pp_rank: int,
        *,
        shards: Sequence[ParameterShard],
        split_trace: MicrobatchTrace | None = None,
        owned: OwnerSteps | None = None,
    ):
        self.trace, self.stages, self.setting, self.schedule = trace, stages, setting, schedule
        self.shards, self.pp_rank, self.split_trace = list(shards), pp_rank, split_trace
        self.owned = owned or OwnerSteps()
        self.local_stages = [stage for stage, rank in enumerate(schedule.stage_ranks) if rank == pp_rank]
        self._segments: dict[tuple[int, bool], StageSegments] = {}
        self._totals: dict[int, tuple[Totals, Totals, Totals, Totals]] = {}
        self._stage_messages_of: dict[tuple[int, str], MessageTotals] = {}
        self._flops: dict[int, float] = {}
        self._alike: dict[int, Hashable] = {}

    @cached_property
    def steps(self) -> Sequence[Step]:
        """Actions with the messages between them, as the engine runs them."""
        return self.setting.steps()[self.pp_rank]

    def segments(self, stage: int, later: bool) -> StageSegments:
        """Of one microbatch. later: its gradients are added to those of an earlier microbatch."""
        key = (stage, later)
        if key not in self._segments:
            source = self.trace.later if later else self.trace.first
            segments = stage_segments(self.trace, source, self.stages, stage)
            self._segments[key] = self._with_split_backward(segments, stage, later)
        return self._segments[key]

    def _with_split_backward(self, segments: StageSegments, stage: int, later: bool) -> StageSegments:
        """Fill in dgrad and wgrad.

        The first stage has no input gradient, so all of its backward is wgrad. Where backward is not split, all of it
        is dgrad.
        """
        if self.split_trace is None:
            return replace(segments, dgrad=segments.backward)
        if stage == 0:
            return replace(segments, wgrad=segments.backward)
        source = self.split_trace.later if later else self.split_trace.first
        split = stage_segments(self.split_trace, source, self.stages, stage)
        return replace(segments, forward=split.forward, dgrad=split.backward, wgrad=split.wgrad)

    def alike(self, stage: int) -> Hashable:
        """What the segments of a stage depend on: stages of as many equal units do the same."""
        if self.stages is None:
            return stage
        if stage not in self._alike:
            recorded = [self.trace.representatives.get(unit, unit) for unit in self.stages.units_of(stage)]
            is_end = stage in (0, self.schedule.num_stages - 1)
            self._alike[stage] = tuple(sorted(Counter(recorded).items())), stage if is_end else None
        return self._alike[stage]

    def boundary(self, stage: int) -> StageBoundary:
        """What `stage` receives from the previous one."""
        if self.stages is None or stage == 0 or stage >= self.schedule.num_stages:
            return StageBoundary()
        first = self.stages.bounds(stage)[0]
        unit = self.stages.units[first]
        boundary = self.trace.boundaries.get(self.trace.representatives.get(unit, unit), StageBoundary())
        return StageBoundary((*boundary.tensors, *self._skips(stage), *self._router_sums(self.stages.units[:first])))

    def _skips(self, stage: int) -> Iterator[tuple[int, bool]]:
        """Outputs of earlier stages that this one uses, or sends on."""
        assert self.stages is not None
        for source, target in self.stages.cuts.skips:
            if self.stages.stage_of_unit(source) < stage <= self.stages.stage_of_unit(target):
                yield from self.trace.skips.get(source, StageBoundary()).tensors

    def _router_sums(self, units: Sequence[str]) -> tuple[tuple[int, bool], ...]:
        """What units send along for the load-balancing loss: see `axes/zero/router_loss.py`."""
        experts = max((self.trace.routers.get(unit, 0) for unit in units), default=0)
        return ((experts * SUM_BYTES, False), (experts * SUM_BYTES, True), (SUM_BYTES, False)) if experts else ()

    # -- sums ---------------------------------------------------------------------------------------------------------

    def totals(self, stage: int) -> tuple[Totals, Totals, Totals, Totals]:
        """Of forward, backward, dgrad and wgrad of a microbatch in one stage."""
        if stage not in self._totals:
            parts = self.segments(stage, later=True)
            forward, backward, dgrad = map(_totals, (parts.forward, parts.backward, parts.dgrad))
            self._totals[stage] = forward, backward, dgrad, _totals(parts.wgrad)
        return self._totals[stage]

    def flops(self, stage: int) -> float:
        """Operations of a microbatch in one stage, recompute among them."""
        if stage not in self._flops:
            segments = self.segments(stage, later=True)
            self._flops[stage] = sum(segment.flops for segment in (*segments.forward, *segments.backward))
        return self._flops[stage]

    def messages_in(self, stage: int, phase: str) -> MessageTotals:
        """What the units of a stage send in "forward" or "backward" of a microbatch."""
        key = stage, phase
        if key not in self._stage_messages_of:
            segments = self.segments(stage, later=True)
            of_phase = segments.forward if phase == "forward" else segments.backward
            messages = ((message, 1) for segment in of_phase for message in segment.messages)
            self._stage_messages_of[key] = _message_totals(messages)
        return self._stage_messages_of[key]

    @cached_property
    def messages_over_data(self) -> tuple[MessageTotals, MessageTotals]:
        """(gathers of ZeRO 3, everything else) over data axes in a step."""
        gathers: list[tuple[Message, int]] = []
        others: list[tuple[Message, int]] = []
        for message, times in self.messages:
            of_attention = message.op in ("send", "all_to_all") or message.module == LAYERS
            in_layers = message.axis == "cp" and of_attention
            if in_layers or not _is_over_data_axes(message, self.setting):
                continue
            is_gather = message.op == "all_gather" and message.phase != "step"
            (gathers if is_gather else others).append((message, times))
        return _message_totals(gathers), _message_totals(others)

    @cached_property
    def sends(self) -> list[Message]:
        """Messages to other stages."""
        return [message for message, _ in self.messages if message.op == "send" and message.axis == "pp"]

    # -- messages -------------------------------------------------------------------------------------------------

    @cached_property
    def messages(self) -> list[tuple[Message, int]]:
        """(message, how often) of a step. Equal messages are added up."""
        counts: Counter[Message] = Counter()
        for message, times in self._all_messages():
            counts[message] += times
        return list(counts.items())

    def _all_messages(self) -> Iterator[tuple[Message, int]]:
        times = self.setting.step_microbatches
        for stage in self.local_stages:
            segments = self.segments(stage, later=False)
            for segment in (*segments.forward, *segments.backward):
                yield from ((message, times) for message in segment.messages)
        yield from self._stage_messages()
        yield from ((message, times) for message in self._router_counts())
        yield from data_messages(self.shards, self.setting)
        yield from ((message, 1) for message in (*self._ties(), *self._scalars()))
        yield from self._pending_reductions()
        yield from ((message, 1) for message in self.owned.messages)

    def _stage_messages(self) -> Iterator[tuple[Message, int]]:
        """(message, times) of tensors that are sent to stages of other ranks and received from them."""
        times = self.setting.step_microbatches
        for stage in self.local_stages:
            for receiver, is_sent in ((stage, False), (stage + 1, True)):
                other = stage + 1 if is_sent else stage - 1
                if not 0 <= other < self.schedule.num_stages or other in self.local_stages:
                    continue
                for size, has_gradient in self.boundary(receiver).tensors:
                    op, back = ("send", "recv") if is_sent else ("recv", "send")
                    yield Message(op, "pp", 2, size, self._input_name(receiver), "forward"), times
                    if has_gradient:
                        yield Message(back, "pp", 2, size, self._input_name(receiver), "backward"), times

    def _router_counts(self) -> Iterator[Message]:
        """The sum over data ranks of what the load-balancing loss counts, on the rank of the last stage."""
        experts = max(self.trace.routers.values(), default=0)
        if experts and self.setting.data_axes and self.schedule.num_stages - 1 in self.local_stages:
            axis, ranks = self.setting.group_name(self.setting.data_axes), self.setting.size(*self.setting.data_axes)
            yield Message("all_reduce", axis, ranks, (experts + 1) * SUM_BYTES, "load-balancing loss", "forward")

    def _input_name(self, stage: int) -> str:
        assert self.stages is not None
        return f"input of {self.stages.units[self.stages.bounds(stage)[0]]}"

    def _pending_reductions(self) -> Iterator[tuple[Message, int]]:
        """Gradients that tp ranks have in part: of replicated parameters and of shared heads. One sum per group of
        ranks.

        Under ZeRO 3 each gradient is summed alone in each backward, before `fully_shard` takes it.
        """
        alone = self.setting.zero == 3
        sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for shard in self.shards:
            for ranks, numel in (
                shard.pending if shard.pending and shard.trained and self.has_gradient(shard.name) else ()
            ):
                for name in shard.names:
                    sizes[name if alone else "pending reductions", ranks] += numel
        for (name, ranks), numel in sizes.items():
            size = numel * self.setting.compute_bytes
            message = Message("all_reduce", "tp", len(ranks), size, name, "backward")
            yield message, self.setting.step_microbatches if alone else 1

    def has_gradient(self, name: str) -> bool:
        """Whether the parameter of the layer that was recorded in the place of this one got a gradient."""
        unit = self.stages.unit_of(name) if self.stages is not None else None
        recorded = name if unit is None else self.trace.representatives[unit] + name.removeprefix(unit)
        return recorded not in self.trace.without_gradient

    def _ties(self) -> Iterator[Message]:
        for shard in self.shards:
            if len(shard.tied_ranks) > 1 and shard.trained:
                size = shard.local_numel(shard.splits.gradient) * self.setting.gradient_bytes
                yield Message("all_reduce", "pp", len(shard.tied_ranks), size, f"tie of {shard.name}", "backward")

    def _scalars(self) -> Iterator[Message]:
        """The token count before the step, with the check of ranks; the loss, and whether a rank failed, after it."""
        everyone, ranks = self.setting.group_name(self.setting.mesh.names), self.setting.mesh.world_size
        if ranks > 1:
            yield Message("all_reduce", everyone, ranks, CHECK_BYTES, "count of tokens", "step")
            yield Message("all_reduce", everyone, ranks, OUTCOME_BYTES, "loss", "step")


MessageTotals = Mapping[tuple[str, str], tuple[float, float]]
"""(op, axis) -> (bytes that a rank sends, messages)."""


def _message_totals(messages: Iterable[tuple[Message, int]]) -> MessageTotals:
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for message, times in messages:
        key = message.op, message.axis
        sent, count = sums.get(key, (0.0, 0.0))
        sums[key] = sent + message.sent_bytes * times, count + times
    return sums


def _totals(segments: Sequence[Segment]) -> Totals:
    total, known = Totals(), {}  # equal layers share their kernels
    for segment in segments:
        key = id(segment.kernels)
        if key not in known:
            known[key] = totals_of(segment.kernels, segment.launches)
        total = total.plus(known[key])
    return total


def _is_over_data_axes(message: Message, setting: Setting) -> bool:
    """Whether a group is along data axes. The axis is "world" where the mesh has no other axes."""
    if message.axis == "world":
        return setting.size(*setting.data_axes) == setting.mesh.world_size
    return set(message.axis.split("*")) <= {*setting.data_axes, "edp"}


# -- the segments of a stage --------------------------------------------------------------------------------------


def stage_segments(
    trace: MicrobatchTrace, source: MicrobatchSegments, stages: Stages | None, stage: int
) -> StageSegments:
    """The segments of a microbatch that a stage runs. Those of represented units get the unit's own name."""
    if stages is None:
        return _balanced([source.forward, source.backward, source.wgrad], None)
    first, stop = stages.bounds(stage)
    units = stages.units[first:stop]
    ends = [LOSS] if stop == len(stages.units) else []
    actions = [
        _forward(source.forward, stages, units, trace, ends),
        _select(source.backward, [*ends, *reversed(units)], trace),
        _select(source.wgrad, [*ends, *reversed(units)], trace),
    ]
    balanced = _balanced(actions, {trace.representatives[unit] for unit in units} | {OUTSIDE, *ends})
    own, every = trace.freed_inputs.get(trace.representatives[units[0]], (0, 0)) if units and stage else (0, 0)
    return replace(
        balanced,
        forward=_with_change(balanced.forward, units[0] if units else "", own),
        backward=_with_change(balanced.backward, "", -every),
    )


def _with_change(segments: tuple[Segment, ...], unit: str, size: int) -> tuple[Segment, ...]:
    """The segments, with one more change at the end of that of a unit; "": of the last one."""
    index = next((n for n, segment in enumerate(segments) if segment.unit == unit), len(segments) - 1)
    if not size or not segments:
        return segments
    changed = replace(segments[index], changes=[*segments[index].changes, MemoryChange(size, 0)])
    return (*segments[:index], changed, *segments[index + 1 :])


def _forward(
    segments: Sequence[Segment], stages: Stages, units: Sequence[str], trace: MicrobatchTrace, ends: list[str]
) -> list[Segment]:
    """What runs before the first layer runs on every stage, in its order among the units there."""
    first_layer = stages.units[stages.num_first] if stages.num_first < len(stages.units) else ""
    index = next((n for n, segment in enumerate(segments) if segment.unit == first_layer), len(segments))
    before = [segment for segment in segments[:index] if segment.unit in (OUTSIDE, *units)]
    names = {segment.unit for segment in before}
    return before + _select(segments, [unit for unit in (*units, *ends) if unit not in names], trace)


def _select(segments: Sequence[Segment], units: Sequence[str], trace: MicrobatchTrace) -> list[Segment]:
    by_unit = {segment.unit: segment for segment in segments}
    pairs = [(unit, trace.representatives.get(unit, unit)) for unit in units]
    return [_renamed(by_unit[recorded], recorded, unit) for unit, recorded in pairs if recorded in by_unit]


def _balanced(actions: Sequence[Sequence[Segment]], present: set[str] | None) -> StageSegments:
    """Segments of a stage that frees everything that it allocates, and nothing else.

    What a unit of another stage would free is freed at the end of that action here. What another stage allocated is not
    here.

    Args:
        actions: forward, backward (or dgrad), wgrad. present: the recorded units of this stage; None for all.
    """
    unfreed = [0, 0, 0]  # bytes to free at the end of each action
    local = [[_segment_of_stage(segment, present, unfreed) for segment in segments] for segments in actions]
    forward, backward, wgrad = (_ended(segments, unfreed[index]) for index, segments in enumerate(local))
    return StageSegments(forward, backward, wgrad=wgrad)


def _segment_of_stage(segment: Segment, present: set[str] | None, unfreed: list[int]) -> Segment:
    """The segment without the releases of what other stages allocated. Adds to `unfreed` what other stages would
    free."""
    if present is None or all(c.other_unit is None or c.other_unit in present for c in segment.changes):
        return segment
    changes = []
    for change in segment.changes:
        elsewhere = change.other_unit is not None and change.other_unit not in present
        if elsewhere and (change.activations < 0 or change.freed_in == ABSENT):
            continue
        if elsewhere:
            unfreed[change.freed_in] += change.activations
        changes.append(change)
    return replace(segment, changes=changes)


def _ended(segments: list[Segment], unfreed: int) -> tuple[Segment, ...]:
    """The segments, of which the last one also frees `unfreed` bytes and what is freed when the action has ended."""
    size = unfreed + sum(segment.freed_at_end for segment in segments)
    if segments and size:
        last = segments[-1]
        changes = [*last.changes, MemoryChange(-size, 0)]
        segments = [*segments[:-1], replace(last, changes=changes, freed_at_end=0)]
    return tuple(segments)


def _renamed(segment: Segment, recorded: str, unit: str) -> Segment:
    if recorded == unit:
        return segment
    messages = [
        m._replace(module=unit + m.module[len(recorded) :]) if m.module.startswith(recorded) else m
        for m in segment.messages
    ]
    return replace(segment, unit=unit, messages=messages)


def receives_early(steps: Sequence[Step], ahead: int) -> dict[int, list[Receive]]:
    """Index of an action -> the receives that are posted before it, as `axes/pipeline/step_runner.py` posts them.

    ahead: how many actions in advance a receive is posted, with transports that match messages by tag; 0 with others.
    """
    posted: set[Receive] = set()
    receives: dict[int, list[Receive]] = {}
    for index, step in enumerate(steps):
        if isinstance(step, Receive) and step not in posted:
            posted.add(step)
            receives.setdefault(index, []).append(step)
        if not isinstance(step, Action):
            continue
        num_actions = 0
        for later in steps[index + 1 :]:
            num_actions += isinstance(later, Action)
            if num_actions > ahead:
                break
            if isinstance(later, Receive) and later not in posted:
                posted.add(later)
                receives.setdefault(index, []).append(later)
    return receives
