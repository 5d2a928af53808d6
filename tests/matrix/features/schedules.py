"""Schedules and stages of ZeRO that are no axis, and options of steps and recomputation that change no number."""

from __future__ import annotations

from typing import Any

from tests.matrix.axes import Axis
from tests.matrix.feature import change
from tests.matrix.features.forwards import NO_LINEAR
from tests.matrix.kinds import KINDS
from tests.matrix.sides import Side


def _of_four_stages(axis: Axis) -> bool:
    return axis.deep and axis.ranks("pp") == 2


LOOPS = {"stages_per_rank": 2, "num_microbatches": 4}
change("looped_bfs", options={"schedule": "looped_bfs", **LOOPS}, on=_of_four_stages)
change("interleaved_zero_bubble", options={"schedule": "interleaved_zero_bubble", **LOOPS}, on=_of_four_stages)
change("dualpipe_v", options={"schedule": "dualpipe_v", **LOOPS}, on=_of_four_stages)


FOUR_LAYERS = {name: {"layers" if name == "own" else "num_hidden_layers": 4} for name in KINDS if name != "llama_equal"}


def _of_stages_and_more(axis: Axis) -> bool:
    return axis.ranks("pp") > 1 and len(axis.sizes) > 1 and not axis.deep


change(
    "split_backwards",
    options={"schedule": "zbv", "stages_per_rank": 2, "num_microbatches": 4},
    on=_of_stages_and_more,
    needs={"causal"},
    overrides=FOUR_LAYERS,
)
change(
    "split_backwards_of_loops",
    options={"schedule": "interleaved_zero_bubble", "stages_per_rank": 2, "num_microbatches": 4},
    on=_of_stages_and_more,
    needs={"causal"},
    overrides=FOUR_LAYERS,
)
change(  # collectives that overlap with matmuls are in the same order on every rank of `tp`
    "split_backwards_with_overlap",
    options={"schedule": "zbv", "stages_per_rank": 2, "num_microbatches": 4, "overlap": "chunked"},
    on=lambda axis: _of_stages_and_more(axis) and axis.ranks("tp") > 1,
    needs={"causal"},
    refused_with={"adapter": NO_LINEAR},
    overrides=FOUR_LAYERS,
)


def twice(side: Side, number: int, step: Any) -> None:
    """Two backwards before an update, whose gradients add up."""
    step(number)
    step(number + 1)


def clipped(side: Side, number: int) -> None:
    side.clip(0.3)


def _has_other_stage(zero: int) -> Any:
    return lambda axis: axis.data_ranks > 1 and len(axis.sizes) > 1 and axis.options.get("zero") != zero


for _zero in range(4):  # each stage of ZeRO on the meshes of several axes that have another
    change(f"zero_{_zero}", options={"zero": _zero}, on=_has_other_stage(_zero), around=twice, gradients=clipped)


change("compared_in_each_step", options={"compare_every": 1})
change("recompute_that_saves", options={"recompute": "selective", "recompute_save": ("collectives",)})
change(  # the messages of a ring are not sent again either
    "recompute_that_saves_attention",
    options={"recompute": "selective", "recompute_save": ("ring_attention",)},
    on=lambda axis: "cp" in axis.sizes,
)
