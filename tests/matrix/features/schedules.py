"""Schedules that are no axis, and options of steps and recomputation that change no number."""

from __future__ import annotations

from tests.matrix.axes import Axis
from tests.matrix.feature import feature
from tests.matrix.sides import Side


def _of_four_stages(axis: Axis) -> bool:
    return axis.deep and axis.ranks("pp") == 2


@feature(on=_of_four_stages)
def looped_bfs(side: Side) -> None:
    side.place(schedule="looped_bfs", stages_per_rank=2, num_microbatches=4)
    side.train()


@feature(on=_of_four_stages)
def interleaved_zero_bubble(side: Side) -> None:
    side.place(schedule="interleaved_zero_bubble", stages_per_rank=2, num_microbatches=4)
    side.train()


@feature(on=_of_four_stages)
def dualpipe_v(side: Side) -> None:
    side.place(schedule="dualpipe_v", stages_per_rank=2, num_microbatches=4)
    side.train()


@feature()
def compared_in_each_step(side: Side) -> None:
    side.place(compare_every=1)
    side.train()


@feature()
def recompute_that_saves(side: Side) -> None:
    """Recomputed units keep the results of collectives alone."""
    side.place(recompute="selective", recompute_save=("collectives",))
    side.train()


@feature(on=lambda axis: "cp" in axis.sizes)
def recompute_that_saves_attention(side: Side) -> None:
    """Also the messages of a ring are not sent again."""
    side.place(recompute="selective", recompute_save=("ring_attention",))
    side.train()
