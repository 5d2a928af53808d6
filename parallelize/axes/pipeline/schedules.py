"""Pipeline schedules as data: which rank runs which action in which order.

    name, ranks, microbatches --build_schedule--> Schedule --simulate | table | run-->

No process group is needed. Actions are computations; the messages follow from their order (`timeline.with_messages`).
The orders with one stage per rank are written here; those with several stages per rank are PyTorch's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from parallelize.base.errors import MeshError, PlanError, Problem
from parallelize.plan.stage_ranks import SCHEDULES, microbatches_problem, ranks_of_stages, schedule_name, stages_problem

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True)
class Action:
    """One microbatch in one stage: "F" forward, "B" full backward, "I" dgrad, or "W" wgrad.

    The text form is that of PyTorch: "2F0" is stage 2, forward, microbatch 0.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form. Raises: PlanError `bad-action`."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            fix = "write stage, one of F B I W, microbatch: `2F0`"
            raise PlanError(Problem("bad-action", f"{text!r} is not an action of a pipeline schedule", fix=fix))
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """The order of actions of every rank.

    Attributes:
        name: a key of `SCHEDULES`.
        num_ranks, num_stages, num_microbatches: the sizes of the pipeline.
        stage_ranks: the rank of each stage.
        orders: the actions of each rank, in order.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]


def build_schedule(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Build the order of actions of every rank.

    Args:
        name: a key of `SCHEDULES`, or the name of the schedule in PyTorch.
        num_ranks: ranks of the pipeline, 1 or more.
        num_microbatches: microbatches of a step, 1 or more; some schedules need more, or a multiple of a number.
        stages_per_rank: 1 for gpipe and 1f1b, 2 for zbv and dualpipe_v, 2 or more (default 2) for the others.

    Returns: a schedule that `check_schedule` accepts.

    Raises:
        PlanError: `unknown-schedule`, `bad-stages-per-rank`, `too-few-microbatches`, `uneven-microbatches`.
        MeshError: `bad-num-ranks`.

    Cost: no communication.

    Source: GPipe arXiv:1811.06965; 1F1B (PipeDream-flush) and interleaved arXiv:2104.04473; looped BFS
        arXiv:2211.05953; zero bubble and ZB-V arXiv:2401.10241, 2405.15362; DualPipe arXiv:2412.19437, as DualPipeV in
        github.com/deepseek-ai/DualPipe.
    """
    name = schedule_name(name)
    kind = SCHEDULES[name]
    stages_per_rank = kind.stages_per_rank if stages_per_rank is None else stages_per_rank
    _check_requirements(name, num_ranks, num_microbatches, stages_per_rank)
    if name == "gpipe":
        orders = [_gpipe(rank, num_microbatches) for rank in range(num_ranks)]
    elif name == "1f1b":
        orders = [_1f1b(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    else:
        orders = _torch_orders(name, num_ranks, num_microbatches, stages_per_rank)
    stage_ranks = ranks_of_stages(name, num_ranks, stages_per_rank)
    schedule = Schedule(name, num_ranks, len(stage_ranks), num_microbatches, stage_ranks, tuple(map(tuple, orders)))
    check_schedule(schedule)
    return schedule


def _check_requirements(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> None:
    if not isinstance(ranks, int) or ranks < 1:
        raise MeshError(Problem("bad-num-ranks", f"a pipeline cannot run on {ranks} ranks", fix="use 1 or more"))
    checks = (stages_problem(name, stages_per_rank), microbatches_problem(name, ranks, microbatches))
    problems = [problem for problem in checks if problem is not None]
    if problems:
        raise PlanError(*problems)


def _gpipe(rank: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards. Source: arXiv:1811.06965, fig. 2c (backwards in the order of the forwards)."""
    return [Action(rank, kind, m) for kind in "FB" for m in range(microbatches)]


def _1f1b(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Forwards until the first gradient arrives, then one backward after each forward. Source: arXiv:2104.04473, fig.
    4."""
    warmup = min(ranks - 1 - rank, microbatches)
    order = [Action(rank, "F", m) for m in range(warmup)]
    for m in range(microbatches - warmup):
        order += [Action(rank, "F", warmup + m), Action(rank, "B", m)]
    return order + [Action(rank, "B", m) for m in range(microbatches - warmup, microbatches)]


def _torch_orders(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    if ranks == 1 and microbatches < SCHEDULES[name].least_per_rank:  # PyTorch refuses this
        return [_depth_first(stages_per_rank, microbatches)]
    from parallelize.base.torch_private.torch_tensors import schedule_orders  # lazy, so that this file needs no torch

    orders = schedule_orders(SCHEDULES[name].torch_name, ranks, microbatches, stages_per_rank)
    if orders is None:
        raise PlanError(Problem("unknown-schedule", f"this torch has no {name}", fix="use `1f1b`, or a newer torch"))
    return [[Action(*op) for op in order] for order in orders]


def _depth_first(stages: int, microbatches: int) -> list[Action]:
    """On one rank: forward and backward of each microbatch through all stages."""
    forwards = [("F", stage) for stage in range(stages)]
    backwards = [("B", stage) for stage in reversed(range(stages))]
    return [Action(stage, kind, m) for m in range(microbatches) for kind, stage in forwards + backwards]


def sources(schedule: Schedule, action: Action) -> list[tuple[Action, ...]]:
    """What `action` depends on: one action of each tuple (a gradient comes from "B" or from "I")."""
    stage, m = action.stage, action.microbatch
    if action.kind == "W":
        return [(Action(stage, "I", m),)]
    if action.kind == "F":
        return [(Action(stage - 1, "F", m),)] if stage > 0 else []
    forward = (Action(stage, "F", m),)
    if stage + 1 == schedule.num_stages:
        return [forward]
    return [forward, (Action(stage + 1, "B", m), Action(stage + 1, "I", m))]


def in_dependency_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Every (rank, action), each after what it depends on. Raises: PlanError `bad-schedule` where ranks deadlock."""
    done: set[Action] = set()
    position = [0] * schedule.num_ranks
    while True:
        before = sum(position)
        for rank, order in enumerate(schedule.orders):
            while position[rank] < len(order) and not _missing(schedule, order[position[rank]], done):
                yield rank, order[position[rank]]
                done.add(order[position[rank]])
                position[rank] += 1
        if sum(position) == before:
            break
    stuck = [
        (rank, order[index])
        for rank, (order, index) in enumerate(zip(schedule.orders, position, strict=True))
        if index < len(order)
    ]
    if stuck:
        rows = tuple((f"rank {rank}", f"{a} waits for {_missing(schedule, a, done)}") for rank, a in stuck)
        what = f"{schedule.name}: deadlock after {len(done)} actions"
        raise PlanError(Problem("bad-schedule", what, rows=rows, fix="reorder these actions"))


def _missing(schedule: Schedule, action: Action, done: set[Action]) -> str:
    """What `action` waits for, or an empty string."""
    missing = [choice for choice in sources(schedule, action) if not any(source in done for source in choice)]
    return ", ".join(" or ".join(map(str, choice)) for choice in missing)


def check_schedule(schedule: Schedule) -> None:
    """Check that each stage runs forward and backward of each microbatch once, on its rank, without deadlock.

    Raises: PlanError `bad-schedule` with the first wrong or blocked actions.
    """
    wrong = _misplaced(schedule) or _wrong_action_counts(schedule)
    if wrong:
        shown = tuple(wrong[:8]) + ((("and", f"{len(wrong) - 8} more"),) if len(wrong) > 8 else ())
        fix = "each stage and microbatch has one F, and one B or one I and one W, on the stage's rank"
        raise PlanError(Problem("bad-schedule", f"{schedule.name}: {len(wrong)} wrong actions", rows=shown, fix=fix))
    for _ in in_dependency_order(schedule):
        pass


def _misplaced(schedule: Schedule) -> list[tuple[str, str]]:
    """Actions of another rank's stage, or of a stage or microbatch that does not exist."""
    if len(schedule.orders) != schedule.num_ranks or len(schedule.stage_ranks) != schedule.num_stages:
        sizes = f"{len(schedule.orders)} orders and {len(schedule.stage_ranks)} ranks of stages"
        return [("sizes", f"{sizes} for {schedule.num_ranks} ranks and {schedule.num_stages} stages")]
    problems = []
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if not (0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches):
                problems.append((f"rank {rank}", f"{action} is of no stage or no microbatch"))
            elif schedule.stage_ranks[action.stage] != rank:
                problems.append((f"rank {rank}", f"{action} belongs to rank {schedule.stage_ranks[action.stage]}"))
    return problems


def _wrong_action_counts(schedule: Schedule) -> list[tuple[str, str]]:
    """Stages and microbatches whose actions are not F and B, or F, I and W."""
    counts = Counter(action for order in schedule.orders for action in order)
    problems = []
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            kinds = "".join(kind * counts[Action(stage, kind, m)] for kind in KINDS)
            if kinds not in ("FB", "FIW"):
                problems.append((f"stage {stage}", f"microbatch {m} has {' '.join(kinds) or 'no action'}"))
    return problems
