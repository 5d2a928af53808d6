"""Schedules and stages of ZeRO that are no axis, and options of steps and recomputation that change no number."""

from __future__ import annotations

from typing import Any

from tests.matrix.axes import Axis
from tests.matrix.feature import feature
from tests.matrix.kinds import KINDS
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


FOUR_LAYERS = {name: {"layers" if name == "own" else "num_hidden_layers": 4} for name in KINDS if name != "llama_equal"}


def _of_stages_and_more(axis: Axis) -> bool:
    return axis.ranks("pp") > 1 and len(axis.sizes) > 1 and not axis.deep


@feature(on=_of_stages_and_more, needs={"causal"}, overrides=FOUR_LAYERS)
def split_backwards(side: Side) -> None:
    side.place(schedule="zbv", stages_per_rank=2, num_microbatches=4)
    side.train()


@feature(on=_of_stages_and_more, needs={"causal"}, overrides=FOUR_LAYERS)
def split_backwards_of_loops(side: Side) -> None:
    side.place(schedule="interleaved_zero_bubble", stages_per_rank=2, num_microbatches=4)
    side.train()


@feature(on=lambda axis: _of_stages_and_more(axis) and axis.ranks("tp") > 1, needs={"causal"}, overrides=FOUR_LAYERS)
def split_backwards_with_overlap(side: Side) -> None:
    """Collectives that overlap with matmuls are in the same order on every rank of `tp`."""
    side.place(schedule="zbv", stages_per_rank=2, num_microbatches=4, overlap="chunked")
    side.train()


def _trains_at(zero: int) -> Any:
    def run(side: Side) -> None:
        side.place(zero=zero)
        side.step(0)
        side.step(1)
        side.clip(0.3)
        side.update()
        side.step(2)

    return run


def _has_other_stage(zero: int) -> Any:
    return lambda axis: axis.data_ranks > 1 and len(axis.sizes) > 1 and axis.options.get("zero") != zero


for _zero in range(4):  # each stage of ZeRO on the meshes of several axes that have another
    feature(name=f"zero_{_zero}", on=_has_other_stage(_zero))(_trains_at(_zero))


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
