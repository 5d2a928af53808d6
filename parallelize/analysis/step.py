"""A whole training step of one rank, put together from one microbatch's segments. Arithmetic.

Which segments: those of the units that the rank's stages own, each as often as there are microbatches, in the order of the
schedule. What is sent besides: boundaries between stages, sums over data axes, ties, gradients that are owed, scalars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parallelize.analysis.data_axes import data_messages
from parallelize.analysis.records import LOSS, OUTSIDE, Boundary, Change, Message, Pass, Segment, Trace
from parallelize.analysis.segmenting import NOWHERE
from parallelize.analysis.setting import Setting
from parallelize.analysis.shares import Share
from parallelize.pipeline.schedules import Action, Schedule
from parallelize.pipeline.timeline import Receive, Send, Step
from parallelize.plan.stages import Stages

COUNT_BYTES = 8  # of the token count, an int64
OUTCOME_BYTES = 16  # whether a rank failed, and the loss: two float64


@dataclass(frozen=True)
class StageSegments:
    """What one stage runs for a microbatch: the first one, whose gradients are new, and every later one."""

    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    inputs: tuple[Segment, ...] = ()  # backward's halves, where they run apart
    weights: tuple[Segment, ...] = ()

    def of(self, kind: str) -> tuple[Segment, ...]:
        """What an action of that kind runs."""
        return {"F": self.forward, "B": self.backward, "I": self.inputs, "W": self.weights}[kind]


class RankStep:
    """One rank of the pipeline.

    Args:
        stages: None where the model has no layers to cut. shares: of this rank. zero_units: modules gathered as one.
        halves: a recording of backward in two halves, where the schedule runs them apart.
    """

    def __init__(
        self,
        trace: Trace,
        stages: Stages | None,
        setting: Setting,
        schedule: Schedule,
        shares: Sequence[Share],
        pp_rank: int,
        zero_units: Sequence[str] = (),
        halves: Trace | None = None,
    ):
        self.trace, self.stages, self.setting, self.schedule = trace, stages, setting, schedule
        self.shares, self.pp_rank, self.zero_units, self.halves = list(shares), pp_rank, zero_units, halves
        self.mine = [stage for stage, rank in enumerate(schedule.stage_ranks) if rank == pp_rank]

    @cached_property
    def steps(self) -> Sequence[Step]:
        """Actions with the messages between them, as the engine runs them."""
        return self.setting.steps()[self.pp_rank]

    def segments(self, stage: int, later: bool) -> StageSegments:
        """Of one microbatch; `later`: its gradients are added to those of an earlier one."""
        key = (stage, later)
        if key not in self._segments:
            source = self.trace.later if later else self.trace.first
            found = stage_segments(self.trace, source, self.stages, stage)
            self._segments[key] = self._halved(found, stage, later)
        return self._segments[key]

    def _halved(self, found: StageSegments, stage: int, later: bool) -> StageSegments:
        """With the halves of backward. The first stage has no inputs, so all of its backward is the second half; where
        halves do not run apart, all of it is the first."""
        if self.halves is None:
            return replace(found, inputs=found.backward)
        if stage == 0:
            return replace(found, weights=found.backward)
        source = self.halves.later if later else self.halves.first
        apart = stage_segments(self.halves, source, self.stages, stage)
        return replace(found, forward=apart.forward, inputs=apart.backward, weights=apart.weights)

    @cached_property
    def _segments(self) -> dict[tuple[int, bool], StageSegments]:
        return {}

    def boundary(self, stage: int) -> Boundary:
        """What goes into `stage` from the one before."""
        if self.stages is None or stage == 0 or stage >= self.schedule.num_stages:
            return Boundary()
        unit = self.stages.units[self.stages.bounds(stage)[0]]
        return self.trace.boundaries.get(self.trace.likenesses.get(unit, unit), Boundary())

    # -- messages -------------------------------------------------------------------------------------------------

    @cached_property
    def messages(self) -> list[tuple[Message, int]]:
        """(message, how often) of a step, equal ones together."""
        counts: Counter[Message] = Counter()
        for message, times in self._all_messages():
            counts[message] += times
        return list(counts.items())

    def _all_messages(self) -> Iterator[tuple[Message, int]]:
        times = self.setting.microbatches
        for stage in self.mine:
            found = self.segments(stage, later=False)
            for segment in (*found.forward, *found.backward):
                yield from ((message, times) for message in segment.messages)
        yield from ((message, 1) for message in self._between_stages())
        yield from data_messages(self.shares, self.setting, self.zero_units)
        yield from ((message, 1) for message in (*self._ties(), *self._scalars()))
        yield from self._owed()

    def _between_stages(self) -> Iterator[Message]:
        """Tensors sent to other stages and received from them, one message each."""
        for step in self.steps:
            if isinstance(step, Action):
                continue
            into = step.stage + (isinstance(step, Send) == (step.direction == "F"))
            phase = "forward" if step.direction == "F" else "backward"
            op = "send" if isinstance(step, Send) else "recv"
            for size, wanted in self.boundary(into).tensors:
                if wanted or step.direction == "F":
                    yield Message(op, "pp", 2, size, self._name_of(into), phase)

    def _name_of(self, stage: int) -> str:
        assert self.stages is not None
        return f"input of {self.stages.units[self.stages.bounds(stage)[0]]}"

    def _owed(self) -> Iterator[tuple[Message, int]]:
        """Gradients of replicated parameters that saw a part of the data, and of shared heads: one sum a group of ranks.

        Under ZeRO 3 each is summed by itself in each backward, before `fully_shard` takes it.
        """
        at_once = self.setting.zero == 3
        sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for share in self.shares:
            for ranks, numel in share.owed if share.trained else ():
                for name in share.names:
                    sizes[name if at_once else "gradients owed", ranks] += numel
        for (name, ranks), numel in sizes.items():
            size = numel * self.setting.compute_bytes
            message = Message("all_reduce", "tp", len(ranks), size, name, "backward")
            yield message, self.setting.microbatches if at_once else 1

    def _ties(self) -> Iterator[Message]:
        for share in self.shares:
            if len(share.tied) > 1 and share.trained:
                ranks = self.setting.size(self.setting.shard_axis)
                numel = share.own(ranks) if self.setting.zero >= 2 else share.numel
                size = numel * self.setting.gradient_bytes
                yield Message("all_reduce", "pp", len(share.tied), size, f"tie of {share.name}", "backward")

    def _scalars(self) -> Iterator[Message]:
        """The count of tokens before, the loss and whether all went well after."""
        if self.setting.data_axes:
            ranks = self.setting.size(*self.setting.data_axes)
            axes = self.setting.product(self.setting.data_axes)
            yield Message("all_reduce", axes, ranks, COUNT_BYTES, "count of tokens", "step")
        if self.setting.mesh.world_size > 1:
            everyone = self.setting.product(self.setting.mesh.names)
            yield Message("all_reduce", everyone, self.setting.mesh.world_size, OUTCOME_BYTES, "loss", "step")


def stage_segments(trace: Trace, source: Pass, stages: Stages | None, stage: int) -> StageSegments:
    """The segments of a pass that a stage runs, those of like units under each unit's own name."""
    if stages is None:
        return _balanced([source.forward, source.backward, source.weights], None)
    first, stop = stages.bounds(stage)
    mine = stages.units[first:stop]
    ends = [LOSS] if stop == len(stages.units) else []
    lists = [
        _forward(source.forward, stages, mine, trace, ends),
        _picked(source.backward, [*ends, *reversed(mine)], trace),
        _picked(source.weights, [*ends, *reversed(mine)], trace),
    ]
    return _balanced(lists, {trace.likenesses[unit] for unit in mine} | {OUTSIDE, *ends})


def _forward(
    segments: Sequence[Segment], stages: Stages, mine: Sequence[str], trace: Trace, ends: list[str]
) -> list[Segment]:
    """What comes before the first layer runs on every stage, in its order among the units there."""
    first_layer = stages.units[stages.num_first] if stages.num_first < len(stages.units) else ""
    place = next((n for n, segment in enumerate(segments) if segment.unit == first_layer), len(segments))
    before = [segment for segment in segments[:place] if segment.unit in (OUTSIDE, *mine)]
    here = {segment.unit for segment in before}
    return before + _picked(segments, [unit for unit in (*mine, *ends) if unit not in here], trace)


def _picked(segments: Sequence[Segment], units: Sequence[str], trace: Trace) -> list[Segment]:
    known = {segment.unit: segment for segment in segments}
    likes = [(unit, trace.likenesses.get(unit, unit)) for unit in units]
    return [_renamed(known[like], like, unit) for unit, like in likes if like in known]


def _balanced(lists: Sequence[Sequence[Segment]], present: set[str] | None) -> StageSegments:
    """Segments of a stage that lets go of all that it makes, and of nothing else.

    What another stage's unit would let go of goes at the end of that action here; what another stage has made is not here.
    """
    owed = [0, 0, 0]
    kept: list[list[Segment]] = []
    for segments in lists:
        kept.append([_of_stage(segment, present, owed) for segment in segments])
    done = [_ended(segments, owed[place]) for place, segments in enumerate(kept)]
    return StageSegments(done[0], done[1], (), done[2])


def _of_stage(segment: Segment, present: set[str] | None, owed: list[int]) -> Segment:
    if present is None or all(change.other is None or change.other in present for change in segment.changes):
        return segment
    changes = []
    for change in segment.changes:
        away = change.other is not None and change.other not in present
        if away and (change.activations < 0 or change.place == NOWHERE):
            continue
        if away:
            owed[change.place] += change.activations
        changes.append(change)
    return Segment(segment.unit, changes, segment.messages, segment.kernels, segment.late)


def _ended(segments: list[Segment], owed: int) -> tuple[Segment, ...]:
    """The segments, the last of which lets go of what is owed, and of what goes when the action has ended."""
    size = owed + sum(segment.late for segment in segments)
    if segments and size:
        last = segments[-1]
        more = [*last.changes, Change(-size, 0)]
        segments = [*segments[:-1], Segment(last.unit, more, last.messages, last.kernels)]
    return tuple(segments)


def _renamed(segment: Segment, like: str, unit: str) -> Segment:
    if like == unit:
        return segment
    messages = [m._replace(module=unit + m.module[len(like) :]) for m in segment.messages]
    return Segment(unit, segment.changes, messages, segment.kernels, segment.late)


def receives_early(steps: Sequence[Step], ahead: int) -> dict[int, list[Receive]]:
    """Where messages find their receive by tag: place of an action -> receives posted before it. As `pipeline/step.py`."""
    posted: set[Receive] = set()
    found: dict[int, list[Receive]] = {}
    for place, step in enumerate(steps):
        if isinstance(step, Receive) and step not in posted:
            posted.add(step)
            found.setdefault(place, []).append(step)
        if not isinstance(step, Action):
            continue
        actions = 0
        for other in steps[place + 1 :]:
            actions += isinstance(other, Action)
            if actions > ahead:
                break
            if isinstance(other, Receive) and other not in posted:
                posted.add(other)
                found.setdefault(place, []).append(other)
    return found
