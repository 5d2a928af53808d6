"""When each action of a pipeline runs, simulated from costs or measured.

    Schedule --simulate--> Timeline (makespan, bubbles, microbatches in flight) --schedule_chart.draw--> picture
    Schedule --with_messages--> the same orders with sends and receives

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallelize.axes.pipeline.schedules import Action, Schedule, in_dependency_order, sources
from parallelize.base.errors import PlanError, Problem

Span = tuple[Action, float, float]  # action, start, stop


@dataclass(frozen=True)
class Costs:
    """Time of each action, in any unit; one number for all stages, or one per stage.

    Attributes:
        forward: the cost of the forward of a microbatch in a stage.
        backward: the cost of its full backward.
        input: the cost of dgrad. Default: half of `backward`.
        weight: the cost of wgrad. Default: `backward` without `input`.
        send: time of a message to another rank, during which no rank is busy.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    input: float | Sequence[float] | None = None
    weight: float | Sequence[float] | None = None
    send: float = 0.0

    def of(self, action: Action) -> float:
        """The time of `action`. Raises: PlanError `bad-costs` where a list has no entry for its stage."""
        if action.kind == "F":
            return _cost_of_stage(self.forward, action.stage)
        if action.kind == "B":
            return _cost_of_stage(self.backward, action.stage)
        backward = _cost_of_stage(self.backward, action.stage)
        if action.kind == "W" and self.weight is not None:
            return _cost_of_stage(self.weight, action.stage)
        dgrad = backward / 2 if self.input is None else _cost_of_stage(self.input, action.stage)
        return dgrad if action.kind == "I" else max(0.0, backward - dgrad)


def _cost_of_stage(cost: float | Sequence[float], stage: int) -> float:
    if isinstance(cost, (int, float)):
        return float(cost)
    if stage >= len(cost):
        raise PlanError(Problem("bad-costs", f"{len(cost)} costs, but a stage {stage}", fix="give one cost per stage"))
    return float(cost[stage])


class InFlight(NamedTuple):
    """The largest number of microbatches at once whose forward is done and whose backward ("B" or "W") is not.

    Attributes:
        stages: the peak of each stage.
        ranks: the peak of each rank; a microbatch counts once for each stage of the rank.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """When each action runs.

    Attributes:
        name: the name that titles show.
        spans: the (action, start, stop) of each rank, in order. The earliest start is 0.
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]

    @classmethod
    def from_measured(cls, spans: Iterable[Iterable[Span]], name: str = "measured") -> Timeline:
        """The timeline of a run.

        Args:
            spans: (action, start, stop) of each rank, in seconds on one clock; the earliest start becomes 0.
            name: the name that titles show.
        """
        ranks = [sorted(rank, key=lambda span: span[1]) for rank in spans]
        first = min((start for rank in ranks for _, start, _ in rank), default=0.0)
        return cls(
            name, tuple(tuple((action, start - first, stop - first) for action, start, stop in rank) for rank in ranks)
        )

    @property
    def makespan(self) -> float:
        """The time from the first start to the last stop over all ranks."""
        return max((stop for rank in self.spans for _, _, stop in rank), default=0.0)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The idle time of each rank within the makespan."""
        return tuple(self.makespan - _busy(rank) for rank in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks over ranks x makespan, 0 to 1."""
        total = len(self.spans) * self.makespan
        return sum(self.bubbles) / total if total else 0.0

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
    """The time covered by spans that are sorted by start; overlapping spans count once."""
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
    """Simulate a schedule: each rank runs its next action as soon as the results that it depends on are there.

    Args:
        schedule: what `build_schedule` returned.
        costs: time of each action. Default: 1 for a forward, 2 for a backward, and messages without delay.

    Returns: the timeline, in the unit of `costs`.

    Raises:
        PlanError: `bad-schedule` where ranks deadlock, `bad-costs`.

    Cost: no communication.
    """
    costs = costs or Costs()
    stops: dict[Action, float] = {}
    free = [0.0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in free]
    for rank, action in in_dependency_order(schedule):
        start = free[rank]
        for choice in sources(schedule, action):
            source = next(candidate for candidate in choice if candidate in stops)
            is_remote = schedule.stage_ranks[source.stage] != rank
            start = max(start, stops[source] + (costs.send if is_remote else 0.0))
        free[rank] = stops[action] = start + costs.of(action)
        spans[rank].append((action, start, stops[action]))
    return Timeline(schedule.name, tuple(map(tuple, spans)))


@dataclass(frozen=True)
class Send:
    """Send the output of `stage` ("F") or the gradient of its input ("B") for `microbatch` to `peer_rank`."""

    stage: int
    microbatch: int
    direction: str
    peer_rank: int

    def __str__(self) -> str:
        return f"{self.stage}SEND_{self.direction}{self.microbatch}"


@dataclass(frozen=True)
class Receive:
    """Receive the input of `stage` ("F") or the gradient of its output ("B") for `microbatch` from `peer_rank`."""

    stage: int
    microbatch: int
    direction: str
    peer_rank: int

    def __str__(self) -> str:
        return f"{self.stage}RECV_{self.direction}{self.microbatch}"


Step = Action | Send | Receive


def with_messages(schedule: Schedule, costs: Costs | None = None) -> list[list[Step]]:
    """The actions of each rank, with a send after each action whose result another rank needs, and the matching
    receive.

    All lists are parts of one sequence in simulated time, in which a send and its receive are one event, and an action
    is at its start. So two ranks have their messages in the same order, and ranks that run their steps one by one do
    not deadlock, even if each send waits for its receive. Backends that match messages by order, such as NCCL, need
    this.

    Raises: PlanError `bad-schedule`, `bad-costs`.
    """
    steps: list[list[Step]] = [[] for _ in range(schedule.num_ranks)]
    for _, _, edge, rank, action in _events(schedule, simulate(schedule, costs)):
        if edge == _START:
            steps[rank].append(action)
        else:
            _add_message(schedule, action, rank, steps)
    return steps


_START, _STOP = 0, 1


def _events(schedule: Schedule, timeline: Timeline) -> list[tuple[float, int, int, int, Action]]:
    """(time, order, start or stop, rank, action), sorted; at the same time, dependencies come first."""
    order = {action: n for n, (_, action) in enumerate(in_dependency_order(schedule))}
    events: list[tuple[float, int, int, int, Action]] = []
    for rank, spans in enumerate(timeline.spans):
        for action, start, stop in spans:
            events.append((start, order[action], _START, rank, action))
            events.append((stop, order[action], _STOP, rank, action))
    return sorted(events, key=lambda event: event[:3])


def _add_message(schedule: Schedule, action: Action, rank: int, steps: list[list[Step]]) -> None:
    if action.kind == "W":
        return
    direction = "F" if action.kind == "F" else "B"
    receiver = action.stage + (1 if direction == "F" else -1)
    if not 0 <= receiver < schedule.num_stages or schedule.stage_ranks[receiver] == rank:
        return
    peer = schedule.stage_ranks[receiver]
    steps[rank].append(Send(action.stage, action.microbatch, direction, peer))
    steps[peer].append(Receive(receiver, action.microbatch, direction, rank))
