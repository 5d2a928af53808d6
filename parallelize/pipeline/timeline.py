"""When each action of a pipeline runs: simulated from costs, or measured.

    Schedule --simulate--> Timeline (makespan, bubbles, microbatches in flight) --gantt.draw--> picture
    Schedule --with_messages--> the same orders with sends and receives between them

Torch-free: a schedule can be looked at before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallelize.errors import PlanError, Problem
from parallelize.pipeline.schedules import Action, Schedule, in_turn, sources

Span = tuple[Action, float, float]  # action, start, stop


@dataclass(frozen=True)
class Costs:
    """Time of one microbatch in one stage, in any unit: one number for all stages, or one for each.

    `input` and `weight` are the halves of a backward that is split: one half of `backward`, and what is left of it.
    `send` is how long a message to another rank travels; it keeps no rank busy.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    input: float | Sequence[float] | None = None
    weight: float | Sequence[float] | None = None
    send: float = 0.0

    def of(self, action: Action) -> float:
        """How long `action` takes. Raises: PlanError `bad-costs` when a list has no entry for its stage."""
        if action.kind == "F":
            return _at(self.forward, action.stage)
        if action.kind == "B":
            return _at(self.backward, action.stage)
        whole = _at(self.backward, action.stage)
        if action.kind == "W" and self.weight is not None:
            return _at(self.weight, action.stage)
        input_ = whole / 2 if self.input is None else _at(self.input, action.stage)
        return input_ if action.kind == "I" else max(0.0, whole - input_)


def _at(cost: float | Sequence[float], stage: int) -> float:
    if isinstance(cost, (int, float)):
        return float(cost)
    if stage >= len(cost):
        raise PlanError(Problem("bad-costs", f"{len(cost)} costs, but a stage {stage}", fix="give one cost per stage"))
    return float(cost[stage])


class InFlight(NamedTuple):
    """Most microbatches at once whose forward is done and whose backward ("B" or "W") is not."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]  # a microbatch counts once for each stage of the rank that holds it


@dataclass(frozen=True)
class Timeline:
    """Each rank's (action, start, stop) in order. The earliest start is 0."""

    name: str
    spans: tuple[tuple[Span, ...], ...]

    @classmethod
    def from_measured(cls, spans: Iterable[Iterable[Span]], name: str = "measured") -> Timeline:
        """A run as it was: each rank's (action, start_s, stop_s) on one clock, moved so that the earliest start is 0."""
        ranks = [sorted(rank, key=lambda span: span[1]) for rank in spans]
        first = min((start for rank in ranks for _, start, _ in rank), default=0.0)
        return cls(name, tuple(tuple((a, start - first, stop - first) for a, start, stop in rank) for rank in ranks))

    @property
    def makespan(self) -> float:
        """From the first start to the last stop, over all ranks."""
        return max((stop for rank in self.spans for _, _, stop in rank), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """How long each rank stands idle within the makespan."""
        return tuple(self.makespan - _busy(rank) for rank in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks over ranks x makespan, 0 to 1."""
        whole = len(self.spans) * self.makespan
        return sum(self.bubbles) / whole if whole else 0.0

    @property
    def in_flight(self) -> InFlight:
        """The peaks of stored activations, in microbatches: by stage and by rank."""
        stages: dict[int, int] = {}
        ranks = []
        for spans in self.spans:
            order = [action for action, _, _ in spans]
            stages.update({stage: _peak(a for a in order if a.stage == stage) for stage in {a.stage for a in order}})
            ranks.append(_peak(order))
        return InFlight(tuple(stages[stage] for stage in sorted(stages)), tuple(ranks))


def _busy(spans: Iterable[Span]) -> float:
    """Time covered by spans in order of their starts; what overlaps counts once."""
    total = end = 0.0
    for _, start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _peak(order: Iterable[Action]) -> int:
    now = most = 0
    for action in order:
        now += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, now)
    return most


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """When each action runs if every rank takes its next one as soon as what it needs is there.

    Raises: PlanError `bad-schedule` when ranks wait in a circle, `bad-costs`.
    """
    costs = costs or Costs()
    stops: dict[Action, float] = {}
    free = [0.0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in free]
    for rank, action in in_turn(schedule):
        start = free[rank]
        for choice in sources(schedule, action):
            source = next(one for one in choice if one in stops)
            away = schedule.stage_ranks[source.stage] != rank
            start = max(start, stops[source] + (costs.send if away else 0.0))
        free[rank] = stops[action] = start + costs.of(action)
        spans[rank].append((action, start, stops[action]))
    return Timeline(schedule.name, tuple(map(tuple, spans)))


@dataclass(frozen=True)
class Send:
    """What `stage` made of `microbatch` goes to a neighbour on `peer_rank`: its output ("F"), or its dgrad ("B")."""

    stage: int
    microbatch: int
    direction: str
    peer_rank: int

    def __str__(self) -> str:
        return f"{self.stage}SEND_{self.direction}{self.microbatch}"


@dataclass(frozen=True)
class Receive:
    """What `stage` needs of `microbatch` comes from `peer_rank`: its input ("F"), or the gradient of its output ("B")."""

    stage: int
    microbatch: int
    direction: str
    peer_rank: int

    def __str__(self) -> str:
        return f"{self.stage}RECV_{self.direction}{self.microbatch}"


Step = Action | Send | Receive


def with_messages(schedule: Schedule, costs: Costs | None = None) -> list[list[Step]]:
    """Each rank's actions with the sends after those that feed another rank and the receives before those fed.

    All lists are cut from one sequence in (simulated) time, in which a send and its receive are one event and an action
    stands where it starts. So any two ranks name their messages in the same order, and ranks that do their steps one by
    one, even with sends that wait for their receive, never wait in a circle: what in-order transports such as NCCL need.

    Raises: PlanError `bad-schedule`, `bad-costs`.
    """
    steps: list[list[Step]] = [[] for _ in range(schedule.num_ranks)]
    for _, _, place, rank, action in _events(schedule, simulate(schedule, costs)):
        if place == _START:
            steps[rank].append(action)
        else:
            _add_message(schedule, action, rank, steps)
    return steps


_START, _STOP = 0, 1


def _events(schedule: Schedule, timeline: Timeline) -> list[tuple[float, int, int, int, Action]]:
    """Starts and stops of all actions in time; at one instant, whatever an action needs before it."""
    turn = {action: n for n, (_, action) in enumerate(in_turn(schedule))}
    events: list[tuple[float, int, int, int, Action]] = []
    for rank, spans in enumerate(timeline.spans):
        for action, start, stop in spans:
            events.append((start, turn[action], _START, rank, action))
            events.append((stop, turn[action], _STOP, rank, action))
    return sorted(events, key=lambda event: event[:3])


def _add_message(schedule: Schedule, action: Action, rank: int, steps: list[list[Step]]) -> None:
    if action.kind == "W":
        return
    direction = "F" if action.kind == "F" else "B"
    to = action.stage + (1 if direction == "F" else -1)
    if not 0 <= to < schedule.num_stages or schedule.stage_ranks[to] == rank:
        return
    peer = schedule.stage_ranks[to]
    steps[rank].append(Send(action.stage, action.microbatch, direction, peer))
    steps[peer].append(Receive(to, action.microbatch, direction, rank))
