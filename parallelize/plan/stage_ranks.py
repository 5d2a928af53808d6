"""Which rank of the pipeline runs which stage, by schedule. `axes/pipeline/schedules.py` builds the order of their
actions.

Torch-free.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from parallelize.base.errors import PlanError, Problem, did_you_mean


@dataclass(frozen=True)
class ScheduleKind:
    """The requirements of a schedule.

    Attributes:
        torch_name: its name in PyTorch.
        stages_per_rank: the default, and the only value allowed unless `more_stages`.
        more_stages: any larger number of stages per rank is allowed too.
        in_rounds: microbatches run in equal rounds of about one per rank.
        v_shape: rank s has the stages s and 2P-1-s of P ranks; else stage s is on rank s % P.
        least_per_rank: at least so many microbatches per rank.
    """

    torch_name: str
    stages_per_rank: int
    more_stages: bool = False
    in_rounds: bool = False
    v_shape: bool = False
    least_per_rank: int = 0


SCHEDULES = {
    "gpipe": ScheduleKind("GPipe", 1),
    "1f1b": ScheduleKind("1F1B", 1),
    "interleaved_1f1b": ScheduleKind("Interleaved1F1B", 2, more_stages=True, in_rounds=True),
    "looped_bfs": ScheduleKind("LoopedBFS", 2, more_stages=True),
    "interleaved_zero_bubble": ScheduleKind("InterleavedZeroBubble", 2, more_stages=True, in_rounds=True),
    "zbv": ScheduleKind("ZBVZeroBubble", 2, v_shape=True),
    "dualpipe_v": ScheduleKind("DualPipeV", 2, v_shape=True, least_per_rank=2),
}
"""All schedules. PyTorch's class names are accepted as well."""


def schedule_name(name: str) -> str:
    """The key of `SCHEDULES` for a name; case, underscores, hyphens and a leading "Schedule" are ignored.

    Raises: PlanError `unknown-schedule`.
    """
    known = {_plain(alias): key for key, kind in SCHEDULES.items() for alias in (key, kind.torch_name)}
    if _plain(name) not in known:
        fix = did_you_mean(name, SCHEDULES)
        raise PlanError(Problem("unknown-schedule", f"there is no pipeline schedule {name!r}", fix=fix))
    return known[_plain(name)]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", str(name).lower()).removeprefix("schedule")


def ranks_of_stages(name: str, num_ranks: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
    """The rank of each stage.

    Args: as for `axes.pipeline.schedules.build_schedule`.
    Raises: PlanError `unknown-schedule`, `bad-stages-per-rank`.
    """
    kind = SCHEDULES[schedule_name(name)]
    stages_per_rank = kind.stages_per_rank if stages_per_rank is None else stages_per_rank
    problem = stages_problem(schedule_name(name), stages_per_rank)
    if problem is not None:
        raise PlanError(problem)
    stages = num_ranks * stages_per_rank
    return tuple(min(s, stages - 1 - s) if kind.v_shape else s % num_ranks for s in range(stages))


def stages_problem(name: str, stages_per_rank: int) -> Problem | None:
    """What is wrong with a number of stages per rank for a schedule."""
    kind = SCHEDULES[name]
    if _takes(kind, stages_per_rank):
        return None
    fix = f"use {kind.stages_per_rank}" + (" or more" if kind.more_stages else "")
    other_schedules = [other for other, other_kind in SCHEDULES.items() if _takes(other_kind, stages_per_rank)]
    if other_schedules:
        fix += f", or a schedule that takes {stages_per_rank}: " + ", ".join(other_schedules)
    return Problem("bad-stages-per-rank", f"{name} cannot run {stages_per_rank} stages on a rank", fix=fix)


def microbatches_problem(name: str, ranks: int, microbatches: int) -> Problem | None:
    """What is wrong with a number of microbatches for a schedule on the ranks of a pipeline."""
    kind = SCHEDULES[name]
    # a single rank has no neighbor to wait for, so it accepts any number
    least = max(1, kind.least_per_rank * ranks) if ranks > 1 else 1
    if not isinstance(microbatches, int) or microbatches < least:
        what = f"{name} on {ranks} ranks cannot run {microbatches} microbatches"
        return Problem("too-few-microbatches", what, fix=f"use {least} or more")
    if kind.in_rounds and not _even_rounds(ranks, microbatches):
        rounds = microbatches // ranks
        below = next(count for count in range(microbatches, 0, -1) if _even_rounds(ranks, count))
        above = next(count for count in range(microbatches, 2 * microbatches) if _even_rounds(ranks, count))
        left = microbatches % rounds
        what = f"{name} on {ranks} ranks runs {rounds} equal rounds: {microbatches} % {rounds} = {left}"
        fix = f"use {below} or {above} microbatches, or any multiple of {ranks}"
        return Problem("uneven-microbatches", what, fix=fix)
    return None


def _even_rounds(ranks: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // ranks) == 0


def _takes(kind: ScheduleKind, stages_per_rank: int) -> bool:
    if not isinstance(stages_per_rank, int):
        return False
    return stages_per_rank == kind.stages_per_rank or (kind.more_stages and stages_per_rank > kind.stages_per_rank)
