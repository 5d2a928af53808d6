"""How long a pipeline takes and how many microbatches wait in it, without listing its actions. Arithmetic, torch-free.

1F1B and its interleaved form have closed forms: a rank holds as many microbatches as there are ranks after it (with
itself), and a step is the busiest rank's work and one microbatch's way through the other ranks. Other schedules are
simulated. `simulate` and the walk over all actions give the same where stages are alike; a test compares them.

Source: Narayanan et al., Efficient Large-Scale Language Model Training, arXiv:2104.04473, sec. 2.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from parallelize.axes.pipeline.schedules import Schedule

CLOSED_FORMS = ("1f1b", "interleaved_1f1b")


def has_closed_form(name: str) -> bool:
    """Whether the functions here serve a schedule."""
    return name in CLOSED_FORMS


def stages_in_flight(ranks: int, stages_per_rank: int, microbatches: int, rank: int) -> Counter[int]:
    """Stage of the rank (counted on it, from 0) -> microbatches whose forward is done and whose backward is not, when
    most are."""
    if stages_per_rank == 1:
        return Counter({0: min(microbatches, ranks - rank)})
    waiting = 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks + 1
    total = min(microbatches * stages_per_rank, waiting)
    return Counter(index // ranks % stages_per_rank for index in range(total))


def pipeline_s(schedule: Schedule, forward: Sequence[float], backward: Sequence[float], send_s: float) -> float:
    """Seconds of a pipeline.

    Args:
        forward, backward: of one microbatch in each stage. send_s: of a message, for which both ranks wait.
    """
    ranks, count = schedule.num_ranks, schedule.num_microbatches
    works = [0.0] * ranks
    for stage, rank in enumerate(schedule.stage_ranks):
        works[rank] += forward[stage] + backward[stage]
    if ranks == 1:
        return count * works[0]
    busiest = max(works)
    per_rank = schedule.num_stages // ranks
    way = sum(works) / per_rank - busiest / per_rank + 2 * (ranks - 1) * send_s
    return count * busiest + way
